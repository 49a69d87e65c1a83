// What a thread of a kernel does with shared memory and barriers, as a list of events. Addresses
// are those of shared memory, from 0 on.
#pragma once

#include <cstdint>
#include <functional>

namespace flash_ext {
extern char storage[];  // shared memory
}

namespace device {

using flash_ext::storage;
inline constexpr int kSharedBytes = 256 << 10;

// The events with their arguments. tests/barrier_model.py has the same list.
enum class Event : uint64_t {
    kInit,        // mbarrier, arrivals
    kArrive,      // mbarrier, arrivals
    kArriveLate,  // mbarrier: when this thread's copies by cp.async are complete
    kExpect,      // mbarrier, bytes: arrives, too
    kTest,        // mbarrier, parity
    kWait,        // mbarrier, parity
    kSync,        // named barrier, threads
    kSignal,      // named barrier, threads: arrives and does not wait
    kWarpSync,    //
    kRead,        // address, bytes
    kWrite,       // address, bytes
    kLoad,        // address, bytes, mbarrier, coordinates (x and y, z and w): by TMA
    kStore,       // address, bytes: read by TMA
    kStoreWait,   // TMA has read all
    kMatmul,      // descriptors of A (0: in registers) and B, columns, is A, is B MN-major?
    kCommit,      // of wgmma
    kMatmulWait,  // groups that may be pending
    kProxyFence,  // what was written is visible to TMA and wgmma
    kCopy,        // address, bytes, source, is it valid? by cp.async
    kCopyCommit,  //
    kCopyWait,    // groups that may be pending
    kEnd,
};

// Notes what this thread does. Before it waits, other threads may go on.
void note(Event event, uint64_t a = 0, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0,
          uint64_t e = 0);

// ldmatrix and stmatrix, of four matrices: the address is that of a row of one of them.
void load_matrices(uint32_t (&registers)[4], uint32_t address, bool transposed);
void store_matrices(uint32_t address, const uint32_t (&registers)[4], bool transposed);

// Called by a launch.
void launch(unsigned ctas, unsigned threads, size_t shared_bytes, std::function<void()> thread);

// Keeps the next launch with so much shared memory, and no other.
void keep_launch_of(size_t shared_bytes);

// Begins the first CTA of this launch. Two threads of each warp run: lane 0 and lane 1, which
// stands for all others. Returns their number, 0 where there was no launch.
int start_threads();

// The next events of a thread, up to one at which it may have to wait, and their number.
int resume(int thread, const uint64_t** events);

}  // namespace device

namespace flash_ext::ptx {
using device::Event, device::note;
}
