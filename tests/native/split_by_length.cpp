// schedule/split_by_length.cuh as a Python module, for tests/test_split_lengths.py.
#include "schedule/split_by_length.cuh"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "launches.h"

namespace flash_ext {
namespace {

using Work = std::vector<std::pair<int, int>>;  // tiles and blocks of each sequence

// The work of a cluster of a head, as a warp finds it.
auto find(int clusters, int least, const Work& work, int index) {
    const SplitsByLength by_length{clusters, least};
    float total = 0.f;
    for (const auto& [tiles, blocks] : work) total += static_cast<float>(tiles) * blocks;
    std::vector<ClusterWork> found(32);
    const device::Lockstep lockstep;
    device::launch(1, 32, 0, [&] {
        found[threadIdx.x] = find_cluster_work(
            index, static_cast<int>(work.size()), by_length.length(total),
            [&](int number) { return SequenceWork{work[number].first, work[number].second}; });
    });
    for (const ClusterWork& x : found)
        if (x.number != found[0].number || x.stored != found[0].stored)
            throw std::runtime_error("lanes differ");
    const ClusterWork x = found[0];
    return std::make_tuple(x.number, x.tile, x.cluster, x.clusters, x.stored);
}

int most(int clusters, int least) { return SplitsByLength{clusters, least}.most(); }

}  // namespace
}  // namespace flash_ext

PYBIND11_MODULE(flash_ext_split_by_length, m) {
    m.def("find", flash_ext::find);
    m.def("most", flash_ext::most);
}
