// The launchers, one per kernel, instantiated per head dim in instantiate/. Each encodes tensor
// maps and launches, on the stream and without waiting, the kernel that the plan names; none
// decides. And the dispatch to instantiations.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <iterator>
#include <optional>
#include <type_traits>
#include <utility>

#include "plan/call.h"
#include "plan/tuning.h"
#include "plan/workspace_rows.cuh"
#include "problem/append_kv.h"
#include "problem/make_mask.cuh"
#include "problem/params.h"
#include "problem/quantize.h"
#include "problem/sum_rows.h"
#include "schedule/split_kv.cuh"
#include "tile/host_device.h"

namespace flash_ext {

// A bias of which TMA can load tiles (kernels/fa3/bias_tiles.cuh): the given one, or a copy of it
// in the workspace, which is as long as a tile where one row or one column is for all.
struct TiledBias {
    void* data = nullptr;  // (B, Hq, Sq, Sk), 1 where one batch element or head is for all
    int element_bytes;
    bool is_copy = false;
    bool broadcast[4];  // is one index for all?
    int64_t sizes[4];
    int64_t strides[3];  // of all but the last dimension
};
inline constexpr int kBiasTile = 256;  // the most rows and columns of a tile

struct ForwardKernel {
    HeadDims head_dims{};           // of its row in the tuning table
    OptionSet options;              // of the sets in this row
    tuning::Fa3ForwardTile tile{};  // FA3's; unless it is the kernel for few queries, with:
    std::optional<tuning::Fa3DecodeTile> decode_tile;
    int decode_cluster = 1;      // its splits of a cluster
    SplitsByLength by_length{};  // of this one; none: of each tile params.num_splits
    bool has_splits = false;     // stores the results of splits, which another kernel combines
    // FP8: the call's V, if another kernel makes params.v of it before; see transpose_v.cuh.
    std::optional<TensorView> row_major_v;
    TiledBias bias;         // FA3's
    int ctas_per_bias = 0;  // of the kernel for short sequences; 0: it is another one
    GpuModel gpu;
};

// FA3 for wide heads: the order of KV tiles, and of Q tiles.
struct WideTileOrders {
    TileOrder keys;
    TileOrder queries;
};

struct BiasGradientKernel {
    HeadDims head_dims;
    bool small_tiles;
    int ctas;  // of a cluster
};

// Does FA3's backward itself write dbias: store dS, or add two of them? See
// kernels/fa3/stored_dbias.cuh.
enum class StoredDBias { kNo, kStored, kAdded };

struct BackwardKernel {
    HeadDims head_dims{};
    OptionSet options;
    GpuModel gpu;
    std::optional<BiasGradientKernel> bias_gradient;  // none: the common one, or with
    int ctas_per_dbias = 0;       // for a tile, of a bias which batch elements or heads share
    int ctas_per_bias = 0;        // as in a forward
    float* dbias_sums = nullptr;  // theirs, if they are several, in the workspace
    // FA3:
    bool many_queries = false;
    int lead = 0;  // see lead_of()
    TiledBias bias;
    StoredDBias stored_dbias = StoredDBias::kNo;
    TiledBias dbias;            // where; is_copy: it is then copied to params.dbias
    bool zeroes_dbias = false;  // where the mask hides tiles
    // FA3 for wide heads. The dS of ds_heads heads of K and V is stored at a time; the last ones
    // may be fewer. 0: the dQ kernel computes dS again.
    int ds_heads = 0;
    void* ds = nullptr;
    DSWorkspaceTiles ds_tiles;
    WideTileOrders wide, last_wide;
};

// Tensors of 16 bits whose rows TMA cannot address, and their copies in the workspace, which have
// rows of a multiple of 16 bytes, one after another. Columns from `cols` on are zeros.
struct RowCopy {
    TensorView given;        // (B, S, H, cols)
    const TensorView* copy;  // of the plan; has its memory when the workspace has
    int batch, rows, heads, cols;
};
struct RowCopies {
    RowCopy all[5];
    int count = 0;
};

// instantiate/ has these types in full: by the aliases nvcc 13.2 ends in an internal error.
using ForwardLauncher = cudaError_t(const ForwardParams& params, const ForwardKernel& kernel,
                                    cudaStream_t stream);
using BackwardLauncher = cudaError_t(const BackwardParams& params, const BackwardKernel& kernel,
                                     cudaStream_t stream);

// FA1's and FA2's. Their kernels run on GPUs with less shared memory than Hopper's: the smallest
// tiles need so many bytes.
template <int kHeadDim, int kHeadDimV>
struct Fa1 {
    static ForwardLauncher forward;
    static BackwardLauncher backward;
    static int forward_shared_bytes();
    static int backward_shared_bytes();
};
template <int kHeadDim, int kHeadDimV>
struct Fa2 {
    static ForwardLauncher forward;
    static BackwardLauncher backward;
    static int forward_shared_bytes();
    static int backward_shared_bytes();
};
// At most tuning::kShortBlock queries and keys.
template <int kHeadDim, int kHeadDimV>
ForwardLauncher short_forward;
template <int kHeadDim, int kHeadDimV>
BackwardLauncher short_backward;
template <int kHeadDim, int kHeadDimV>
ForwardLauncher fa3_forward;
template <int kHeadDim, int kHeadDimV>
ForwardLauncher fa3_decode;
// With k and v in kFloat8 or kInt8, and q in 16 bits.
template <int kHeadDim, int kHeadDimV>
ForwardLauncher fa3_decode_8_bits;
// With q and k in kFloat8 or kInt8, and v in kFloat8.
template <int kHeadDim, int kHeadDimV>
ForwardLauncher fa3_forward_fp8;
template <int kHeadDim, int kHeadDimV>
BackwardLauncher fa3_backward;
template <int kHeadDim, int kHeadDimV>
BackwardLauncher fa3_backward_wide;
// After the backward of any variant, whose workspace it reads.
template <int kHeadDim, int kHeadDimV>
BackwardLauncher fa3_bias_gradient;

// Before a pass from the given tensors to the copies, or after it back.
cudaError_t copy_rows(const RowCopies& copies, bool back, cudaStream_t stream);

// Before a pass of FA3 whose bias is a copy.
cudaError_t tile_bias(const Bias& bias, ElementType type, const TiledBias& copy,
                      cudaStream_t stream);

// After a backward of FA3 that has stored dbias elsewhere, or without its factor.
cudaError_t copy_dbias(const BackwardParams& params, const TiledBias& stored, cudaStream_t stream);

// Before a forward in FP8 whose kernel does not transpose V itself: makes params.v.
cudaError_t transpose_v(const ForwardParams& params, const TensorView& row_major,
                        cudaStream_t stream);

// After a forward with split keys, by a kernel of these head dims. `pdl` as for launch_kernel().
cudaError_t combine_splits(const ForwardParams& params, HeadDims dims, cudaStream_t stream,
                           bool pdl);

// Before a variant's backward, a CTA for each block_q rows.
cudaError_t backward_preprocess(const BackwardParams& params, int block_q, cudaStream_t stream);

// After a variant's backward, whose workspace they read.
cudaError_t bias_gradient(const BackwardParams& params, const BackwardKernel& kernel,
                          cudaStream_t stream);
cudaError_t sink_gradient(const BackwardParams& params, cudaStream_t stream);
// dk and dv as the sums over parts, whose gradients are in params.dk and params.dv.
cudaError_t sum_parts(const BackwardParams& params, TensorView dk, TensorView dv,
                      cudaStream_t stream);

// Before a deterministic backward with varlen: from the call's offsets (B + 1) makes
// params' offsets, in the workspace, with which no CTA can wait forever.
cudaError_t sanitize_cu_seqlens(BackwardParams params, const int* given_q, const int* given_k,
                                cudaStream_t stream);

// Beside attention: kernels that read tensors row by row.

// x_8bit and descale. Block scales take one pass over memory, others a first one for the maxima.
cudaError_t quantize(QuantizeParams params, const GpuModel& gpu, cudaStream_t stream);

// Rows of x that a CTA reduces column by column.
inline constexpr int kColumnRows = 512;

// mean_out: the mean over the rows in use of each sequence, 0 where it has none.
cudaError_t token_mean(const QuantizeParams& params, cudaStream_t stream, bool pdl = false);

// All of a call: q and k by blocks, v by channels and transposed. mean: of k, null for none.
cudaError_t quantize_qkv(const QuantizeParams& q, const QuantizeParams& k, const QuantizeParams& v,
                         const QuantizeParams* mean, const GpuModel& gpu, cudaStream_t stream);

cudaError_t sum_rows(const SumRowsParams& params, cudaStream_t stream);

cudaError_t make_mask(const MakeMaskParams& params, cudaStream_t stream);

cudaError_t append_kv(const AppendKVParams& params, cudaStream_t stream);

// --- Dispatch ---
//
// A run-time value becomes a compile-time constant: dispatch<64, 96, 128>(n, [](auto dim) { ... })
// calls the function with std::integral_constant<int, 64> and so on, and returns its status.

// A dispatch found no instantiation, so nothing ran. CUDA itself no longer returns this code.
inline constexpr cudaError_t kNoKernel = cudaErrorMissingConfiguration;

// The function may return another type than a status. Without an instantiation the result is
// `none`.
template <auto... kValues, class T, class Function, class Result = cudaError_t>
Result dispatch(T value, Function&& function, Result none = kNoKernel) {
    Result result = none;
    ((value == kValues && (result = function(std::integral_constant<T, kValues>{}), true)) || ...);
    return result;
}

// function(std::integral_constant<int, i>) for i = 0 .. kCount - 1.
template <int kCount, int kFirst = 0, class Function>
FLASH_HOST_DEVICE void compile_time_for(Function&& function) {
    if constexpr (kFirst < kCount) {
        function(std::integral_constant<int, kFirst>{});
        compile_time_for<kCount, kFirst + 1>(function);
    }
}

// function(constant set) of the sets of a row that equals `options`.
template <OptionSets kSets, class Function>
cudaError_t dispatch_options(OptionSet options, Function&& function) {
    return [&]<size_t... i>(std::index_sequence<i...>) {
        return dispatch<kSets.sets[i]...>(options, function);
    }(std::make_index_sequence<kSets.count>{});
}

// function(constants qk and v) of the row of a tuning table with these dims, or `none`.
template <auto& kTable, class Function, class Result = cudaError_t>
Result dispatch_head_dims(HeadDims dims, Function&& function, Result none = kNoKernel) {
    const auto call = [&](auto found) {
        return function(std::integral_constant<int, found.value.qk>{},
                        std::integral_constant<int, found.value.v>{});
    };
    return [&]<size_t... i>(std::index_sequence<i...>) {
        return dispatch<kTable[i].head_dims...>(dims, call, none);
    }(std::make_index_sequence<std::size(kTable)>{});
}

// Calls function(element tag), of 16 bits.
template <class Function>
cudaError_t dispatch_element(ElementType type, Function function) {
    if (type == ElementType::kFloat16) return function(__half{});
    return type == ElementType::kBFloat16 ? function(__nv_bfloat16{}) : kNoKernel;
}

// Calls launch(element tag, constant set of options) for the set that the plan has chosen.
template <OptionSets kSets, class Kernel, class Launch>
cudaError_t dispatch_kernel(const AttentionParams& params, const Kernel& kernel, Launch launch) {
    return dispatch_options<kSets>(kernel.options, [&](auto options) {
        return dispatch_element(params.element_type,
                                [&](auto element) { return launch(element, options); });
    });
}

}  // namespace flash_ext
