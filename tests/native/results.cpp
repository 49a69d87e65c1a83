// What parts of kernels store: V^T, dS and descales, for tests/test_layouts.py.
#include "kernels/fa3/backward.cuh"
#include "kernels/fa3/forward_fp8.cuh"
#include "kernels/fp8/transpose_v.cuh"
#include "lanes.h"
#include "tile/transpose.cuh"

namespace flash_ext {

cudaError_t backward_preprocess(const BackwardParams&, int, cudaStream_t) { return cudaSuccess; }
cudaError_t tile_bias(const Bias&, ElementType, const TiledBias&, cudaStream_t) {
    return cudaSuccess;
}

namespace {

// V^T of a tile of V, from its bytes and to them, row by row.
template <int kKeys, int kCols>
std::vector<uint8_t> transposed(const std::vector<uint8_t>& v) {
    using Source = SharedTile<Float8, kKeys, kCols>;
    using Target = SharedTile<Float8, kCols, kKeys>;
    for (int key = 0; key < kKeys; ++key)
        for (int col = 0; col < kCols; ++col)
            storage[Source::offset(key, col / 16) + col % 16] = v[key * kCols + col];
    for (int warp = 0; warp < 2; ++warp)
        device::run_warp(warp,
                         [&](int) { transpose_fp8<Source, Target, 2>(0, Source::kBytes, warp); });
    std::vector<uint8_t> all;
    for (int col = 0; col < kCols; ++col)
        for (int key = 0; key < kKeys; ++key)
            all.push_back(storage[Source::kBytes + Target::offset(col, key / 16) + key % 16]);
    return all;
}

// What transpose_kernel makes of V (rows, heads, columns) in varlen sequences, or without offsets
// in a batch of `batch`, and where channel 0 and key 0 of each of them and of a head are. Of 16
// bits with scales of channels, from the maxima over kSumDivisor.
template <class Element>
std::pair<std::vector<uint8_t>, std::vector<int64_t>> transposed_v(
    std::vector<uint8_t> v, int batch, int heads, int cols, const std::vector<int>& cu_seqlens,
    const std::vector<int>& seqused, std::vector<float> amax) {
    const bool varlen = !cu_seqlens.empty();
    const int batches = varlen ? 1 : batch;
    const int row = heads * cols, rows = static_cast<int>(v.size() / sizeof(Element)) / row;
    std::vector<float> descale(amax.size());
    QuantizeParams params{};
    params.batch = batch;
    params.rows = rows / batches;
    params.heads = heads;
    params.head_dim = cols;
    params.cu_seqlens = varlen ? cu_seqlens.data() : nullptr;
    params.seqused = seqused.empty() ? nullptr : seqused.data();
    params.x = {v.data(), int64_t{params.rows} * row, row, cols};
    params.scales = Scales::kChannel;
    params.amax = amax.data();
    params.descale = descale.data();
    params.numerator = kMaxFloat8 / kSumDivisor;
    params.least_amax = params.numerator / kMaxFactor;
    const int keys = transposed_keys(params.rows, batch, varlen);
    std::vector<uint8_t> all(int64_t{batches} * heads * cols * keys, 0xee);
    params.transposed = transposed_view(all.data(), heads, cols, keys);
    device::runs_launches = true;
    launch_transpose<Element>(params, nullptr);
    device::runs_launches = false;

    std::vector<int64_t> offsets;
    for (int number = 0; number < batch; ++number)
        for (int head = 0; head < heads; ++head) {
            Sequence s{varlen ? 0 : number, varlen ? number + 1 : 0, 0,
                       varlen ? cu_seqlens[number] : 0};
            offsets.push_back(transposed_v_offset(params.transposed, s, head));
        }
    offsets.push_back(keys);
    return {all, offsets};
}

// read(state) of an FP8 consumer that has loaded the descales of a KV tile, of a sequence with so
// many keys in use.
template <int kHeadDim, class Read>
auto with_descales(Fa3ForwardParams params, int keys, int kv_tile, Read read) {
    constexpr auto kTuning =
        tuning::fa3_forward_fp8_shape({kHeadDim, kHeadDim}, tuning::Fa3ForwardTile::kUsual);
    using Kernel = Fa3ForwardFp8<Float8, kHeadDim, kHeadDim, tuning::kVarlen, kTuning>;
    params.heads_q = params.heads_k = 1;
    threadIdx = {128};
    const Kernel kernel(params);
    typename Kernel::Scores scores;
    typename Kernel::Output out;
    typename Kernel::Softmax softmax;
    typename Kernel::State x{scores, out, softmax};
    x.kv_tile = kv_tile;
    QueryTile& tile = kernel.work_tiles[x.tile];
    tile = {};
    tile.sequence.seqlen_k = keys;
    kernel.begin_scales(x, tile);
    kernel.load_k_scales(x);
    return read(x);
}

// K's descales of a KV tile of 256 keys.
std::array<float, 2> key_descales(const std::vector<float>& descales, int keys, int kv_tile) {
    Fa3ForwardParams params{};
    params.k_descale.data = descales.data();
    params.k_descale.last_stride = 1;
    params.k_descale.last_block = static_cast<int>(descales.size()) - 1;
    return with_descales<128>(params, keys, kv_tile,
                              [](const auto& x) { return std::array{x.k_scale[0], x.k_scale[1]}; });
}

// Without descales: may a maximum be so large that rows are looked at, to be cooled?
template <int kHeadDim>
bool may_be_large(double scale) {
    Fa3ForwardParams params{};
    params.scale_log2 = static_cast<float>(scale * kLog2e);
    return with_descales<kHeadDim>(params, 512, 0, [](const auto& x) { return x.may_be_large; });
}

// dS^T in shared memory, (key, query), where that of key i and query j is kBlockQ i + j.
template <int kHeadDim, OptionSet kOptions = tuning::kVarlen>
std::vector<std::vector<int>> stored_ds() {
    constexpr auto kTuning = tuning::fa3_backward_shape({kHeadDim, kHeadDim}, kOptions, false);
    using Kernel = Fa3Backward<Half, kHeadDim, kHeadDim, kOptions, kTuning>;
    using Tile = typename Kernel::DSTile;
    constexpr int kBlockQ = Kernel::kBlockQ;
    static const Fa3BackwardParams params{};
    for (int warp = 4; warp < 12; ++warp)
        device::run_warp(warp, [&](int) {
            typename Kernel::Operand rdS;
            for (int k = 0; k < kBlockQ / 16; ++k)
                for (int i = 0; i < 4; ++i) {
                    const int key = 16 * (warp - 4) + lane_row() + i % 2 * 8;
                    const int query = 16 * k + i / 2 * 8 + lane_col();
                    const uint32_t number = kBlockQ * key + query;
                    rdS.v[k][i] = (number + 1) << 16 | number;
                }
            Kernel(params).store_ds(rdS, 1);
        });
    const char* stage = shared_storage<typename Kernel::SharedStorage>().ds[1];
    std::vector<std::vector<int>> all(Kernel::kBlockKV);
    for (int key = 0; key < Kernel::kBlockKV; ++key)
        for (int query = 0; query < kBlockQ; ++query) {
            const int row = kTuning.transpose_dq ? query : key;
            const int col = kTuning.transpose_dq ? key : query;
            uint16_t number;
            std::memcpy(&number, stage + Tile::offset(row, col / 8) + col % 8 * 2, 2);
            all[key].push_back(number);
        }
    return all;
}

}  // namespace

void bind_results(py::module_& m) {
    m.def("transposed", [](int keys, int cols, const std::vector<uint8_t>& v) {
        return keys == 64 ? transposed<64, 64>(v) : transposed<192, 256>(v);
    });
    m.def("transposed_v", &transposed_v<Float8>);
    m.def("bits_of_keys", &bits_of_keys);
    m.def("quantized_v", &transposed_v<Half>);
    m.def("key_descales", &key_descales);
    m.def("may_be_large", [](int head_dim, double scale) {
        return head_dim == 64    ? may_be_large<64>(scale)
               : head_dim == 128 ? may_be_large<128>(scale)
                                 : may_be_large<256>(scale);
    });
    m.def("stored_ds", [](int head_dim, bool dropout) {
        return dropout          ? stored_ds<64, tuning::kWithDropout>()
               : head_dim == 64 ? stored_ds<64>()
               : head_dim == 96 ? stored_ds<96>()
                                : stored_ds<128>();
    });
}

}  // namespace flash_ext
