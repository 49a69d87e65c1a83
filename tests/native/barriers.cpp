// The kernels of attention, for tests/test_barriers.py: each runs on the host with products that
// are 0, and its threads note what they do with shared memory and barriers (fake_cuda/device.h).
// Whether a wait may end is decided in Python.
#include <algorithm>
#include <map>
#include <string>

#include "device.h"
#include "kernels/fa1/backward.cuh"
#include "kernels/fa1/forward.cuh"
#include "kernels/fa2/backward.cuh"
#include "kernels/fa2/forward.cuh"
#include "kernels/fa3/backward.cuh"
#include "kernels/fa3/backward_wide.cuh"
#include "kernels/fa3/bias_gradient.cuh"
#include "kernels/fa3/decode.cuh"
#include "kernels/fa3/forward.cuh"
#include "kernels/fa3/forward_fp8.cuh"

namespace flash_ext {

cudaError_t backward_preprocess(const BackwardParams&, int, cudaStream_t) { return cudaSuccess; }
cudaError_t tile_bias(const Bias&, ElementType, const TiledBias&, cudaStream_t) {
    return cudaSuccess;
}

namespace {

// --- The kernels ---

// A call: all lengths, and the options that change an order of tiles.
struct Shape {
    int batch, heads_q, heads_k, seqlen_q, seqlen_k, window_left, window_right;
    int num_splits, pack_gqa_log2, deterministic, varlen, split_ctas;
    int cu_seqlens_q[8], cu_seqlens_k[8];
};

alignas(16) char global[32 << 20];  // all tensors: nobody looks at their elements

TensorView view(const Shape& call, int rows, int heads, int cols) {
    return {global, call.varlen ? 0 : int64_t{rows} * heads * cols, int64_t{heads} * cols, cols};
}

template <class Params>
Params params_of(const Shape& call, ElementType type, int head_dim, bool general) {
    Params x{};
    x.element_type = type;
    x.out_type = ElementType::kBFloat16;
    x.batch = call.batch;
    x.heads_q = call.heads_q;
    x.heads_k = call.heads_k;
    x.seqlen_q = call.seqlen_q;
    x.seqlen_k = call.seqlen_k;
    x.head_dim = x.head_dim_v = head_dim;
    if (call.varlen) {
        x.cu_seqlens_q = call.cu_seqlens_q;
        x.cu_seqlens_k = call.cu_seqlens_k;
    }
    const auto side = [](int window) { return window < 0 ? BandMask::kUnlimited : window; };
    x.window_left = side(call.window_left);
    x.window_right = side(call.window_right);
    x.scale = x.scale_log2 = 1.f;
    x.softcap = general ? 1.f : 0.f;
    x.changes_scores = general;
    x.aligned = true;
    x.q = view(call, call.seqlen_q, call.heads_q, head_dim);
    x.k = view(call, call.seqlen_k, call.heads_k, head_dim);
    x.v = view(call, call.seqlen_k, call.heads_k, head_dim);
    x.out = view(call, call.seqlen_q, call.heads_q, head_dim);
    return x;
}

ForwardParams forward_params(const Shape& call, ElementType type, int head_dim, bool general) {
    static unsigned long long counter;
    auto x = params_of<ForwardParams>(call, type, head_dim, general);
    x.lse = reinterpret_cast<float*>(global);
    x.counters = &counter;
    x.pack_gqa_log2 = call.pack_gqa_log2;
    x.num_splits = call.num_splits;
    x.split_ctas = call.split_ctas;
    x.group = x.heads_q / x.heads_k;
    x.by_group = Divisor(x.group);
    if (call.num_splits > 1) {
        x.o_partial = reinterpret_cast<float*>(global);
        x.statistics_partial = reinterpret_cast<PartialStatistics*>(global);
    }
    return x;
}

BackwardParams backward_params(const Shape& call, int head_dim, bool general = false) {
    static unsigned long long words[3];
    auto x = params_of<BackwardParams>(call, ElementType::kBFloat16, head_dim, general);
    x.dout = x.out;
    x.dq = x.q;
    x.dk = x.k;
    x.dv = x.v;
    x.large_lse = {&words[2], 1};
    x.deterministic = call.deterministic;
    x.row_groups = row_groups(x);
    x.padding_row = padding_row(x);
    x.dq_accum = x.lse_log2 = x.minus_delta = x.reference = reinterpret_cast<float*>(global);
    x.lse_rows = x.delta_rows = reinterpret_cast<StatisticsRow*>(global);
    static int semaphores[1 << 16];
    std::fill(std::begin(semaphores), std::end(semaphores), 0);
    x.dq_semaphore = semaphores;
    x.tile_count_semaphore = words;
    static const int64_t numbers[2]{};
    x.rng_state = numbers;
    return x;
}

// The members of a kernel's shared memory: "kind address bytes name", a line each. Those of
// barriers have the names of the tables in the kernels' headers. A pipeline's are pairs: full and
// empty.
std::string members;

// given_v_t: does a kernel that may transpose V have V^T?
template <class Storage>
void list_members(bool given_v_t) {
    members.clear();
    const auto add = [](const char* kind, size_t address, size_t bytes, const char* name) {
        members += std::string(kind) + " " + std::to_string(address) + " " + std::to_string(bytes) +
                   " " + name + "\n";
    };
#define FLASH_MEMBER(kind, name, member)              \
    if constexpr (requires(Storage& x) { x.member; }) \
        add(kind, offsetof(Storage, member), sizeof(Storage::member), name);
    const bool transposes_v = requires(Storage& x) { x.v_row_major_barriers; } && !given_v_t;
    FLASH_MEMBER("pipeline", "Q", q_barriers)
    FLASH_MEMBER("pipeline", "K", k_barriers)
    FLASH_MEMBER("pipeline", transposes_v ? "V^T" : "V", v_barriers)
    FLASH_MEMBER("pipeline", "row-major V", v_row_major_barriers)
    FLASH_MEMBER("pipeline", "bias", bias.barriers)
    FLASH_MEMBER("pipeline", "dO", do_barriers)
    FLASH_MEMBER("pipeline", "dQ", dq_barriers)
    FLASH_MEMBER("pipeline", "pool", pool_barriers)
    FLASH_MEMBER("pipeline", "P", p_barriers)
    FLASH_MEMBER("pipeline", "stages", barriers)
    FLASH_MEMBER("pipeline", "work tiles", work_tiles.barriers)
    FLASH_MEMBER("barrier", "fetch", work_tiles.fetch)
    FLASH_MEMBER("barrier", "dS", ds_barriers)
    FLASH_MEMBER("barrier", "turn", turns)
    FLASH_MEMBER("barrier", "full(V's descales)", v_descales_full)
    FLASH_MEMBER("barrier", "full(partial V)", partial_full)
    FLASH_MEMBER("data", "Q", q)
    FLASH_MEMBER("data", "K", k)
    FLASH_MEMBER("data", "V", v)
    FLASH_MEMBER("data", "bias", bias.stages)
    FLASH_MEMBER("data", "row-major V", v_row_major)
    FLASH_MEMBER("data", "V's descales", v_descales)
    FLASH_MEMBER("data", "dO", dout)
    FLASH_MEMBER("data", "dS", ds)
    FLASH_MEMBER("data", "dQ", dq)
    FLASH_MEMBER("data", "lse", lse)
    FLASH_MEMBER("data", "delta", minus_delta)
    FLASH_MEMBER("data", "pool", pool)
    FLASH_MEMBER("data", "statistics", statistics)
    FLASH_MEMBER("data", "P", p)
    FLASH_MEMBER("data", "stages", stages)
    FLASH_MEMBER("data", "bias", bias)
    FLASH_MEMBER("data", "steps", steps)
    FLASH_MEMBER("data", "work tiles", work_tiles.stages)
    FLASH_MEMBER("data", "words", mask.intervals)
    FLASH_MEMBER("data", "bits", mask.bits)
    FLASH_MEMBER("data", "first keys", mask.first_keys)
    FLASH_MEMBER("data", "words", mask.words)
    FLASH_MEMBER("data", "first queries", mask.first_queries)
    FLASH_MEMBER("data", "teams", teams)
    FLASH_MEMBER("pipeline", "K and V", kv.full_empty)
    FLASH_MEMBER("data", "K and V", kv.stages)
#undef FLASH_MEMBER
}

// Keeps what launch(call) launches with the kernel's shared memory.
template <class Kernel, class Launch>
cudaError_t keep(Launch launch, bool given_v_t = false) {
    device::keep_launch_of(sizeof(typename Kernel::SharedStorage));
    list_members<typename Kernel::SharedStorage>(given_v_t);
    return launch();
}

using enum tuning::Fa3ForwardTile;
using Element = __nv_bfloat16;

constexpr int kSms = 1;  // so that the first CTA gets all tiles

// All tiles of `rows` rows in `blocks` of a tile, of so many heads and of all batches.
TileOrder tile_order_of(const AttentionParams& params, int rows, int block, int heads) {
    return {tile_numbers(params, rows, block), heads, tensor_batches(params)};
}

// Of float32, whose tiles have two stages, if the kernel has it.
TiledBias bias_of(const AttentionParams& params, bool may_be_float32 = true) {
    const bool is_float32 = may_be_float32 && params.head_dim <= tuning::kFa3Float32BiasHeadDim;
    return {.data = global,
            .element_bytes = is_float32 ? 4 : 2,
            .broadcast = {},
            .sizes = {params.batch, params.heads_q, params.seqlen_q, params.seqlen_k},
            .strides = {}};
}

// K and V of the call in pages of half a tile: it has two boxes, and of a warp two lanes run.
template <int kSize>
void put_in_pages(ForwardParams& params, const Shape& call) {
    constexpr int kPagesOfSequence = 64;
    static const int table[8 * kPagesOfSequence] = {};
    static int used[8];
    for (int i = 0; i < call.batch; ++i)
        used[i] = call.varlen ? call.cu_seqlens_k[i + 1] - call.cu_seqlens_k[i] : call.seqlen_k;
    params.pages = {table, kPagesOfSequence, /*count=*/1, kSize};
    params.seqused_k = used;
    params.cu_seqlens_k = nullptr;
    params.seqlen_k = kSize * kPagesOfSequence;
}

// A mask that shows all blocks: of each row the last one in part, by bits up to d 64, otherwise by
// intervals.
void show_all_blocks(AttentionParams& params) {
    constexpr int kMostBlocks = 64, kRow = kMaskHeader + 2;
    static int kv_tiles[kMostBlocks][kRow], q_tiles[kMostBlocks][kRow];
    const int q_blocks = ceil_div(params.seqlen_q, kMaskBlock);
    const int kv_blocks = ceil_div(params.seqlen_k, kMaskBlock);
    const auto list = [](int* row, int i, int full, int partial) {
        *row++ = full;
        *row++ = partial;
        *row++ = (full > 0) + (partial > 0);
        *row++ = i;
        if (full > 0) *row++ = static_cast<int>(mask_run(0, full));
        if (partial > 0) *row = static_cast<int>(mask_run(full, partial));
    };
    for (int i = 0; i < q_blocks; ++i) list(kv_tiles[i], i, kv_blocks - 1, 1);
    for (int i = 0; i < kv_blocks; ++i) {
        const bool full = i < kv_blocks - 1;
        list(q_tiles[i], i, full ? q_blocks : 0, full ? 0 : q_blocks);
    }
    params.tile_mask = {.kv_tiles = kv_tiles[0],
                        .q_tiles = q_tiles[0],
                        .words = reinterpret_cast<uint32_t*>(global),
                        .kv_row = kRow,
                        .q_row = kRow,
                        .q_blocks = q_blocks,
                        .kv_blocks = kv_blocks,
                        .bits = params.head_dim <= 64};
}

template <class Kernel>
cudaError_t launch_forward(const Shape& call, ElementType type, bool general = false,
                           bool given_v_t = false) {
    const auto launch = [&] {
        ForwardParams params = forward_params(call, type, Kernel::kHeadDim, general);
        if constexpr (Kernel::kPages) put_in_pages<Kernel::kBlockKV / 2>(params, call);
        if constexpr (Kernel::kMask) show_all_blocks(params);
        params.v_transposed = given_v_t;
        TileOrder order =
            tile_order_of(params, params.seqlen_q, Kernel::kBlockQ >> call.pack_gqa_log2,
                          call.pack_gqa_log2 > 0 ? call.heads_k : call.heads_q);
        order.tiles *= call.split_ctas > 0 ? call.split_ctas : call.num_splits;
        params.tile_order = order;
        const TiledBias bias = bias_of(params, Kernel::kConsumers < 4);
        return launch_fa3_forward<Kernel>(params, {.bias = bias, .gpu = {.sms = kSms}}, nullptr);
    };
    return keep<Kernel>(launch, given_v_t);
}

// FA1's and FA2's launchers choose a kernel by the GPU, of which there is none here.
template <class Kernel, auto kKernel, class Params>
cudaError_t launch_ctas(int ctas, const Params& params) {
    return launch_kernel<kKernel>(ctas, Kernel::kThreads, sizeof(typename Kernel::SharedStorage),
                                  params, nullptr);
}

// The host is no Hopper GPU: this says that any GPU has the shared memory.
template <int kHeadDim, OptionSet kOptions>
struct Fa1ForwardHere : Fa1Forward<Element, kHeadDim, kHeadDim, kOptions, false> {
    using Fa1Forward<Element, kHeadDim, kHeadDim, kOptions, false>::Fa1Forward;
    static constexpr int kSharedBytes = 0;
};

template <int kHeadDim, OptionSet kOptions = tuning::kAllOptions>
cudaError_t fa1_forward(const Shape& call) {
    using Kernel = Fa1ForwardHere<kHeadDim, kOptions>;
    return keep<Kernel>([&] {
        auto params =
            forward_params(call, ElementType::kBFloat16, kHeadDim, changes_scores(kOptions));
        params.out_accum = params.row_statistics = reinterpret_cast<float*>(global);
        if constexpr (contains(kOptions, OptionSet::kMask)) show_all_blocks(params);
        return launch_ctas<Kernel, fa1_forward_kernel<Kernel>>(
            params.heads_q * sequence_count(params), params);
    });
}

template <int kHeadDim, OptionSet kOptions = tuning::kAllOptions>
cudaError_t fa1_backward(const Shape& call) {
    using Kernel = Fa1BackwardTile<Element, kHeadDim, kHeadDim, kOptions>;
    return keep<Kernel>([&] {
        auto params = backward_params(call, kHeadDim, changes_scores(kOptions));
        if constexpr (contains(kOptions, OptionSet::kMask)) show_all_blocks(params);
        return launch_ctas<Kernel, fa1_backward_kernel<Kernel>>(
            params.heads_k * sequence_count(params), params);
    });
}

template <int kHeadDim, OptionSet kOptions = tuning::kVarlenSplits>
cudaError_t fa2_forward(const Shape& call) {
    using Kernel = Fa2ForwardOf<Element, kHeadDim, kHeadDim, kOptions, false>;
    return keep<Kernel>([&] {
        constexpr bool kGeneral = changes_scores(kOptions);
        auto params = forward_params(call, ElementType::kBFloat16, kHeadDim, kGeneral);
        if constexpr (contains(kOptions, OptionSet::kPages))
            put_in_pages<Kernel::kBlockKV / 2>(params, call);
        if constexpr (contains(kOptions, OptionSet::kMask)) show_all_blocks(params);
        params.tile_order = tile_order_of(params, params.seqlen_q, Kernel::kBlockQ, call.heads_q);
        return launch_ctas<Kernel, fa2_forward_kernel<Kernel>>(work_tile_count(params.tile_order),
                                                               params);
    });
}

template <int kHeadDim, OptionSet kOptions = tuning::kVarlenSplits>
cudaError_t fa2_backward(const Shape& call) {
    using Kernel = Fa2BackwardTile<Element, kHeadDim, kHeadDim, kOptions, true>;
    return keep<Kernel>([&] {
        auto params = backward_params(call, kHeadDim, changes_scores(kOptions));
        if constexpr (contains(kOptions, OptionSet::kMask)) show_all_blocks(params);
        params.tile_order = tile_order_of(params, params.seqlen_k, Kernel::kBlockKV, call.heads_k);
        return launch_ctas<Kernel, fa2_backward_kernel<Kernel>>(work_tile_count(params.tile_order),
                                                                params);
    });
}

template <int kHeadDim, tuning::Fa3ForwardTile kTile, OptionSet kOptions = tuning::kVarlen>
cudaError_t forward(const Shape& call) {
    using Kernel = Fa3Forward<Element, kHeadDim, kHeadDim, kOptions,
                              tuning::fa3_forward_shape({kHeadDim, kHeadDim}, kOptions, kTile)>;
    return launch_forward<Kernel>(call, ElementType::kBFloat16, changes_scores(kOptions));
}

template <int kHeadDim, tuning::Fa3ForwardTile kTile = kUsual, bool kGivenVT = false>
cudaError_t forward_fp8(const Shape& call) {
    using Kernel = Fa3ForwardFp8<Float8, kHeadDim, kHeadDim, tuning::kVarlen,
                                 tuning::fa3_forward_fp8_shape({kHeadDim, kHeadDim}, kTile)>;
    return launch_forward<Kernel>(call, ElementType::kFloat8, false, kGivenVT);
}

// With a bias it stores dbias.
template <int kHeadDim, bool kManyQueries = false, OptionSet kOptions = tuning::kVarlen,
          bool kMayBeFloat32 = true>
cudaError_t backward(const Shape& call) {
    using Kernel =
        Fa3Backward<Element, kHeadDim, kHeadDim, kOptions,
                    tuning::fa3_backward_shape({kHeadDim, kHeadDim}, kOptions, kManyQueries)>;
    return keep<Kernel>([&] {
        auto params = backward_params(call, kHeadDim, changes_scores(kOptions));
        if constexpr (Kernel::kMask) show_all_blocks(params);
        params.tile_order =
            tile_order_of(params, params.seqlen_k, Kernel::kBlockKV, params.heads_k);
        const TiledBias bias = bias_of(params, kMayBeFloat32);
        return launch_fa3_backward<Kernel>(params,
                                           {.gpu = {.sms = kSms},
                                            .bias = bias,
                                            .stored_dbias = StoredDBias::kStored,
                                            .dbias = bias,
                                            .zeroes_dbias = true},
                                           nullptr);
    });
}

template <int kHeadDim>
constexpr tuning::Fa3BackwardWideRow kWide = row_of(tuning::kFa3BackwardWide, {kHeadDim, kHeadDim});

DSWorkspace ds_workspace(const BackwardParams& params) {
    return {global, 0, params.heads_k * params.batch, DSWorkspaceTiles(params, summary_of(params))};
}

template <int kHeadDim, bool kStoresDS>
cudaError_t backward_dkdv(const Shape& call) {
    using Kernel = Fa3BackwardDKDV<Element, kHeadDim, kHeadDim, tuning::kVarlen,
                                   kWide<kHeadDim>.pool_pairs, kStoresDS>;
    return keep<Kernel>([&] {
        const auto params = backward_params(call, kHeadDim);
        TileOrder order = tile_order_of(params, params.seqlen_k, Kernel::kBlockKV, params.heads_k);
        DSWorkspace ds;
        if (kStoresDS) {
            ds = ds_workspace(params);
            order = {order.tiles, ds.heads, 1};
        }
        return launch_fa3_backward_pass<Kernel>(params, ds, order, kSms, nullptr);
    });
}

template <int kHeadDim>
cudaError_t backward_dq(const Shape& call) {
    using Kernel = Fa3BackwardDQ<Element, kHeadDim, kHeadDim, tuning::kVarlen>;
    return keep<Kernel>([&] {
        const auto params = backward_params(call, kHeadDim);
        return launch_fa3_backward_pass<Kernel>(
            params, {}, tile_order_of(params, params.seqlen_q, Kernel::kBlockQ, params.heads_q),
            kSms, nullptr);
    });
}

template <int kHeadDim>
cudaError_t backward_dq_gemm(const Shape& call) {
    using Kernel = Fa3BackwardDQGemm<Element, kHeadDim, kWide<kHeadDim>.dq_gemm_stages>;
    return keep<Kernel>([&] {
        const auto params = backward_params(call, kHeadDim);
        const int tiles = ceil_div(params.seqlen_q, Kernel::kBlockQ);
        return launch_fa3_backward_pass<Kernel>(
            params, ds_workspace(params), {tiles, params.heads_q * params.batch, 1}, kSms, nullptr);
    });
}

// Of a bias of one element, which is added to all tiles of scores.
template <int kHeadDim, bool kSmall>
cudaError_t bias_gradient(const Shape& call) {
    constexpr auto kRow = row_of(tuning::kFa3BiasGradient, {kHeadDim, kHeadDim});
    using Kernel = Fa3BiasGradient<Element, kHeadDim, kHeadDim, kSmall ? kRow.small : kRow.usual>;
    return keep<Kernel>([&] {
        auto params = backward_params(call, kHeadDim);
        params.bias.data = params.dbias = global;
        return launch_fa3_bias_gradient<Kernel>(params, 1, nullptr);
    });
}

template <class OfMatmuls, class Key, auto& kTable, auto kLauncher>
cudaError_t decode(const Shape& call) {
    constexpr auto kRow = tuning::row_of(kTable, {128, 128});
    constexpr OptionSet kOptions = kRow.options.sets[0];
    using Kernel = Fa3Decode<OfMatmuls, Key, 128, 128, kOptions,
                             tuning::fa3_decode_shape(kRow, tuning::Fa3DecodeTile::kFewRows)>;
    return keep<Kernel>([&] {
        auto params = forward_params(call, ElementType::kBFloat16, 128, false);
        if (sizeof(Key) == 1) params.key_type = ElementType::kFloat8;
        params.tile_order = tile_order_of(params, params.seqlen_q, Kernel::kRows, params.heads_q);
        return kLauncher(
            params, {.options = kOptions, .decode_tile = tuning::Fa3DecodeTile::kFewRows}, nullptr);
    });
}

constexpr auto decode_8_bits =
    decode<__half, Float8, tuning::kFa3Decode8Bits, fa3_decode_8_bits<128, 128>>;

// tests/test_barriers.py reads their names here.
const std::map<std::string, cudaError_t (*)(const Shape&)> kKernels{
    {"fa1 forward 64", fa1_forward<64>},  // three teams
    {"fa1 forward 64, mask", fa1_forward<64, tuning::kVarlenMask>},
    {"fa1 forward 128", fa1_forward<128>},
    {"fa1 backward 64", fa1_backward<64>},
    {"fa1 backward 64, mask", fa1_backward<64, tuning::kVarlenMask>},
    {"fa1 backward 128", fa1_backward<128>},
    {"fa2 forward 64", fa2_forward<64>},
    {"fa2 forward 128", fa2_forward<128>},
    {"fa2 forward 64, pages", fa2_forward<64, tuning::kPagesScores>},
    {"fa2 forward 64, mask", fa2_forward<64, tuning::kAllAndMask>},
    {"fa2 backward 64", fa2_backward<64>},
    {"fa2 backward 64, mask", fa2_backward<64, tuning::kAllAndMask>},
    {"fa2 backward 256", fa2_backward<256>},
    {"forward 64, small Q", forward<64, kSmallQ>},  // ping-pong
    {"forward 64", forward<64, kUsual>},            // four consumers
    {"forward 128", forward<128, kUsual>},          // two P, two steps with a mask
    {"forward 64, splits", forward<64, kSmallQ, tuning::kVarlenSplits>},
    {"forward 64, packed GQA", forward<64, kSmallQ, tuning::kVarlenSplits>},
    {"forward 64, fixed splits", forward<64, kSmallQ, tuning::kVarlenSplits>},
    {"forward 64, merged splits", forward<64, kSmallQ, tuning::kVarlenSplits>},
    {"forward 64, pages and merged splits", forward<64, kSmallQ, tuning::kPagesSplits>},
    {"forward 64, pages", forward<64, kUsual, tuning::kPages>},
    {"forward 64, pages and splits", forward<64, kSmallQ, tuning::kPagesSplits>},
    {"forward 64, general", forward<64, kSmallQ, tuning::kFa3Scores>},
    {"forward 64, bias", forward<64, kUsual, tuning::kFa3Bias>},
    {"forward 64, bias, small Q", forward<64, kSmallQ, tuning::kFa3Bias>},
    {"forward 128, bias", forward<128, kSmallQ, tuning::kFa3Bias>},
    {"forward 64, mask", forward<64, kSmallQ, tuning::kFa3Mask>},
    {"forward 64, mask and splits", forward<64, kSmallQ, tuning::kFa3MaskSplits>},
    {"forward 128, mask", forward<128, kSmallQ, tuning::kFa3Mask>},
    {"forward 256", forward<256, kUsual>},                  // one stage of Q
    {"forward_fp8 64, small Q", forward_fp8<64, kSmallQ>},  // transposes V
    {"forward_fp8 64, small Q, V^T", forward_fp8<64, kSmallQ, true>},
    {"forward_fp8 64", forward_fp8<64>},
    {"forward_fp8 96", forward_fp8<96>},
    {"forward_fp8 128", forward_fp8<128>},
    {"forward_fp8 256", forward_fp8<256>},
    {"backward 64", backward<64>},    // dK takes dS from shared memory
    {"backward 96", backward<96>},    // early fences
    {"backward 128", backward<128>},  // early exponentials
    {"backward 128, many queries", backward<128, true>},
    {"backward 64, general", backward<64, false, tuning::kFa3Scores>},
    {"backward 64, dropout", backward<64, false, tuning::kWithDropout>},
    {"backward 128, dropout", backward<128, false, tuning::kWithDropout>},
    {"backward 64, bias", backward<64, false, tuning::kFa3Bias>},
    {"backward 64, bias of 16 bits", backward<64, false, tuning::kFa3Bias, false>},
    {"backward 128, bias", backward<128, false, tuning::kFa3Bias>},
    {"backward 64, mask", backward<64, false, tuning::kFa3Mask>},
    {"backward 128, mask", backward<128, false, tuning::kFa3Mask>},
    {"backward_dkdv 192", backward_dkdv<192, false>},
    {"backward_dkdv 256, stores dS", backward_dkdv<256, true>},
    {"backward_dq 192", backward_dq<192>},
    {"backward_dq 256", backward_dq<256>},
    {"backward_dq_gemm 256", backward_dq_gemm<256>},
    {"bias_gradient 64", bias_gradient<64, false>},
    {"bias_gradient 64, small tiles", bias_gradient<64, true>},  // consumers alternate
    {"decode 128", decode<Element, Element, tuning::kFa3Decode, fa3_decode<128, 128>>},
    {"decode 128, 8 bits", decode_8_bits},
};

}  // namespace
}  // namespace flash_ext

// --- For Python ---

extern "C" {

// Begins the first CTA of a kernel. Returns the number of its threads, 0 where nothing was
// launched.
int start(const char* name, const flash_ext::Shape* call) {
    const cudaError_t status = flash_ext::kKernels.at(name)(*call);
    return status == cudaSuccess ? device::start_threads() : 0;
}

// The members of the shared memory of this kernel.
const char* members() { return flash_ext::members.c_str(); }

// A thread's next events, up to one for which it may have to wait.
int resume(int thread, const uint64_t** events) { return device::resume(thread, events); }
}
