#pragma once

#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

inline void barrier_sync(int id, int threads) { note(Event::kSync, id, threads); }
inline void barrier_arrive(int id, int threads) { note(Event::kSignal, id, threads); }

}  // namespace flash_ext::ptx
