// Launches of kernels without asynchronous copies: threads run one after another. If they exchange
// values (Lockstep), the threads of a CTA run in turns, each up to its next exchange. All threads
// of a warp that have not ended must reach the same number of them; at __syncthreads() all
// threads of a CTA wait for each other.
#pragma once

#include <cuda_runtime.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#include "device.h"

namespace device {

void note(Event, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) {}
void load_matrices(uint32_t (&)[4], uint32_t, bool) {}
void store_matrices(uint32_t, const uint32_t (&)[4], bool) {}

namespace {

bool in_lockstep = false;

// While it lives, the threads of a launch run in turns.
struct Lockstep {
    Lockstep() { in_lockstep = true; }
    ~Lockstep() { in_lockstep = false; }
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 << 10);
    bool ended = false;
};

std::vector<Fiber> fibers;
std::vector<int64_t> given, exchanged;
unsigned turn = 0;
ucontext_t scheduler;
std::function<void()> thread_of_kernel;

void run_fiber() {
    thread_of_kernel();
    fibers[threadIdx.x].ended = true;
}

// What each thread of the CTA has given, once all have.
const int64_t* exchange_in_turns(int64_t x) {
    const unsigned thread = threadIdx.x;
    given[thread] = x;
    swapcontext(&fibers[thread].context, &scheduler);
    return exchanged.data();
}

void launch_in_lockstep(unsigned ctas, unsigned threads, std::function<void()> thread) {
    thread_of_kernel = std::move(thread);
    exchange = exchange_in_turns;
    given.assign(threads, 0);
    blockDim = {threads};
    for (blockIdx.x = 0; blockIdx.x < ctas; ++blockIdx.x) {
        fibers = std::vector<Fiber>(threads);
        for (Fiber& fiber : fibers) {
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = &scheduler;
            makecontext(&fiber.context, run_fiber, 0);
        }
        for (bool any = true; any;) {
            any = false;
            exchanged = given;
            ++turn;
            for (unsigned i = 0; i < threads; ++i) {
                if (fibers[i].ended) continue;
                any = true;
                threadIdx.x = i;
                swapcontext(&scheduler, &fibers[i].context);
            }
        }
    }
    exchange = nullptr;
}

}  // namespace

void launch(unsigned ctas, unsigned threads, size_t, std::function<void()> thread) {
    if (in_lockstep) return launch_in_lockstep(ctas, threads, std::move(thread));
    for (blockIdx.x = 0; blockIdx.x < ctas; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) thread();
}

}  // namespace device

void __syncwarp() {
    if (device::exchange != nullptr) device::exchange(0);
}
void __syncthreads() {
    if (device::exchange == nullptr) return;
    static unsigned arrived = 0, passed_in_turn = 0;
    static uint64_t passed = 0;
    const uint64_t before = passed;
    if (++arrived == blockDim.x) {
        arrived = 0;
        passed_in_turn = device::turn;
        ++passed;
    }
    // All leave in the same turn: the lanes of a warp have to stay in step.
    do device::exchange(0);
    while (passed == before || device::turn == passed_in_turn);
}
