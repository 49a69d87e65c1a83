// Checks of sequence lengths, which are on the device, where the host cannot see them.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "api/check.h"

namespace flash_ext {
namespace {

std::vector<int> fetch(const std::optional<Tensor>& tensor, cudaStream_t stream) {
    std::vector<int> values(tensor ? tensor->numel() : 0);
    if (!values.empty() &&
        (cudaMemcpyAsync(values.data(), tensor->data_ptr(), values.size() * sizeof(int),
                         cudaMemcpyDeviceToHost, stream) != cudaSuccess ||
         cudaStreamSynchronize(stream) != cudaSuccess)) {
        cudaGetLastError();
        fail(
            "FLASH_EXT_DEBUG=1 cannot read sequence lengths here, for example while a CUDA graph "
            "is captured");
    }
    return values;
}

}  // namespace

void debug_seqlens(const Sizes& sizes, const Options& options, cudaStream_t stream) {
    if (!sizes.varlen && !options.seqused_k) return;
    const char* debug = std::getenv("FLASH_EXT_DEBUG");
    if (debug == nullptr || std::string(debug) == "0" || std::string(debug).empty()) return;
    using std::to_string;
    std::vector<int> offsets;  // in the end of k
    for (const bool of_k : {false, true}) {
        const std::string side = of_k ? "k" : "q";
        const int64_t total = of_k ? sizes.seqlen_k : sizes.seqlen_q;
        offsets = fetch(of_k ? options.cu_seqlens_k : options.cu_seqlens_q, stream);
        int longest = 0;
        for (size_t b = 0; b < offsets.size(); ++b) {
            const int before = b == 0 ? 0 : offsets[b - 1];
            if (offsets[b] < before || offsets[b] > (b == 0 ? 0 : total))
                refuse("cu_seqlens_" + side + "[" + to_string(b) + "]",
                       b == 0 ? "0"
                              : "from " + to_string(before) + " (the entry before) to " +
                                    to_string(total) + " (all rows)",
                       offsets[b]);
            longest = std::max(longest, offsets[b] - before);
        }
        const auto& descale = of_k ? options.k_descale : options.q_descale;
        const int blocks = ceil_div(longest, kDescaleRows);
        if (descale && descale->dim() == 3 && sizes.varlen && descale->size(2) < blocks)
            refuse(side + "_descale",
                   "of at least " + to_string(blocks) + " blocks, those of the longest sequence",
                   shape_text(descale->sizes()));
        const int64_t reach = options.bias ? options.bias->size(2 + of_k) : 1;
        if (reach != 1 && reach < longest)
            refuse("bias",
                   "as long as the longest sequence in dimension " + to_string(2 + of_k) +
                       ", at least " + to_string(longest),
                   reach);
    }
    const std::vector<int> used = fetch(options.seqused_k, stream);
    for (size_t b = 0; b < used.size(); ++b) {
        const int64_t length = sizes.varlen ? offsets[b + 1] - offsets[b] : sizes.seqlen_k;
        if (used[b] < 0 || used[b] > length)
            refuse("seqused_k[" + to_string(b) + "]",
                   "from 0 to the sequence's " + to_string(length) + " keys", used[b]);
    }
}

}  // namespace flash_ext
