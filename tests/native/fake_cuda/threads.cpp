// The threads of a CTA, one after another, see device.h.
//
// The compiler calls a function at each access to memory (-fsanitize=thread): so loads and stores
// that the source does not spell out are noted, too.
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "cuda_runtime.h"
#include "device.h"

#define NOT_NOTED __attribute__((no_sanitize("thread")))

namespace device {
namespace {

using Noted = std::array<uint64_t, 6>;

struct Thread {
    unsigned index;
    std::vector<Noted> events;
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(256 << 10);
};

std::vector<Thread> threads;
Thread* current = nullptr;
ucontext_t python;
std::function<void()> kernel;
unsigned kernel_threads = 0;
size_t wanted_shared_bytes = 0;

// The bytes that the current thread has accessed since its last event.
constexpr uint8_t kReads = 1, kWrites = 2;
uint8_t accesses[kSharedBytes];
int accessed[kSharedBytes], accessed_bytes = 0;

NOT_NOTED void access(const void* p, size_t bytes, uint8_t kind) {
    const int64_t offset = static_cast<const char*>(p) - storage;
    if (current == nullptr || offset < 0 || offset >= kSharedBytes) return;
    for (size_t i = offset; i < offset + bytes; ++i) {
        if (accesses[i] == 0) accessed[accessed_bytes++] = i;
        accesses[i] |= kind;
    }
}

void note_accesses(uint8_t kind, Event event) {
    std::vector<Noted>& events = current->events;
    uint64_t end = ~uint64_t{0};
    for (int i = 0; i < accessed_bytes; ++i) {
        const uint64_t byte = accessed[i];
        if (!(accesses[byte] & kind)) continue;
        if (end != byte) events.push_back({static_cast<uint64_t>(event), byte, 0});
        ++events.back()[2];
        end = byte + 1;
    }
}

void note_accesses() {
    std::sort(accessed, accessed + accessed_bytes);
    note_accesses(kReads, Event::kRead);
    note_accesses(kWrites, Event::kWrite);
    for (int i = 0; i < accessed_bytes; ++i) accesses[accessed[i]] = 0;
    accessed_bytes = 0;
}

bool may_wait(Event event) {
    return event == Event::kWait || event == Event::kSync || event == Event::kWarpSync ||
           event == Event::kEnd;
}

void run_thread() {
    kernel();
    note(Event::kEnd);
}

}  // namespace

void note(Event event, uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e) {
    note_accesses();
    current->events.push_back({static_cast<uint64_t>(event), a, b, c, d, e});
    if (may_wait(event)) swapcontext(&current->context, &python);
}

void load_matrices(uint32_t (&registers)[4], uint32_t address, bool) {
    note(Event::kRead, address, 16);
    for (uint32_t& x : registers) x = 0;
}

void store_matrices(uint32_t address, const uint32_t (&)[4], bool) {
    note(Event::kWrite, address, 16);
}

void keep_launch_of(size_t shared_bytes) {
    kernel = nullptr;
    wanted_shared_bytes = shared_bytes;
}

void launch(unsigned ctas, unsigned count, size_t shared_bytes, std::function<void()> thread) {
    if (shared_bytes != wanted_shared_bytes) return;
    gridDim = {ctas};
    kernel = std::move(thread);
    kernel_threads = count;
}

int start_threads() {
    if (!kernel) return 0;
    std::fill(storage, storage + kSharedBytes, 0);
    threads.clear();
    threads.resize(kernel_threads / 16);
    for (unsigned i = 0; i < threads.size(); ++i) {
        Thread& thread = threads[i];
        thread.index = i / 2 * 32 + i % 2;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = thread.stack.size();
        makecontext(&thread.context, run_thread, 0);
    }
    return static_cast<int>(threads.size());
}

int resume(int thread, const uint64_t** events) {
    current = &threads[thread];
    current->events.clear();
    threadIdx = {current->index};
    swapcontext(&python, &current->context);
    *events = current->events.data()->data();
    const auto count = static_cast<int>(current->events.size());
    current = nullptr;
    return count;
}

}  // namespace device

void __syncwarp() { device::note(device::Event::kWarpSync); }
void __syncthreads() { device::note(device::Event::kSync, 0, device::kernel_threads); }

extern "C" {
#define FLASH_ACCESS(bytes)                                                                    \
    NOT_NOTED void __tsan_read##bytes(void* p) { device::access(p, bytes, device::kReads); }   \
    NOT_NOTED void __tsan_write##bytes(void* p) { device::access(p, bytes, device::kWrites); } \
    NOT_NOTED void __tsan_unaligned_read##bytes(void* p) { __tsan_read##bytes(p); }            \
    NOT_NOTED void __tsan_unaligned_write##bytes(void* p) { __tsan_write##bytes(p); }
FLASH_ACCESS(1)
FLASH_ACCESS(2)
FLASH_ACCESS(4)
FLASH_ACCESS(8)
FLASH_ACCESS(16)
NOT_NOTED void __tsan_read_range(void* p, size_t n) { device::access(p, n, device::kReads); }
NOT_NOTED void __tsan_write_range(void* p, size_t n) { device::access(p, n, device::kWrites); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
// Other threads do not run meanwhile.
uint64_t __tsan_atomic64_load(const volatile uint64_t* p, int) { return *p; }
uint64_t __tsan_atomic64_fetch_or(volatile uint64_t* p, uint64_t x, int) {
    return std::exchange(*p, *p | x);
}
uint64_t __tsan_atomic64_fetch_add(volatile uint64_t* p, uint64_t x, int) {
    return std::exchange(*p, *p + x);
}
}
