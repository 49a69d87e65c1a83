#include "api/debug_seqlens.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "api/check.h"

namespace flash_ext {

void debug_seqlens(const Sizes& sizes, const Options& options, cudaStream_t stream) {
    if (!sizes.varlen && !options.seqused_k) return;
    const char* debug = std::getenv("FLASH_EXT_DEBUG");
    if (debug == nullptr || std::string(debug) == "0" || std::string(debug).empty()) return;
    const auto fetch = [&](const std::optional<Tensor>& tensor) {
        std::vector<int> values(tensor ? tensor->numel() : 0);
        if (!values.empty() &&
            (cudaMemcpyAsync(values.data(), tensor->data_ptr(), values.size() * sizeof(int),
                             cudaMemcpyDeviceToHost, stream) != cudaSuccess ||
             cudaStreamSynchronize(stream) != cudaSuccess)) {
            cudaGetLastError();
            fail(
                "FLASH_EXT_DEBUG=1 cannot read sequence lengths here, for example while a CUDA "
                "graph is captured");
        }
        return values;
    };
    const std::vector<int> offsets[2] = {fetch(options.cu_seqlens_q), fetch(options.cu_seqlens_k)};
    for (int i = 0; i < 2 && sizes.varlen; ++i) {
        const std::string name = i == 0 ? "cu_seqlens_q" : "cu_seqlens_k";
        const int64_t total = i == 0 ? sizes.seqlen_q : sizes.seqlen_k;
        for (size_t b = 0; b < offsets[i].size(); ++b) {
            const int64_t low = b == 0 ? 0 : offsets[i][b - 1];
            const int64_t high = b == 0 ? 0 : total;
            if (offsets[i][b] < low || offsets[i][b] > high)
                refuse(name + "[" + std::to_string(b) + "]",
                       b == 0 ? "0"
                              : "from " + std::to_string(low) + " (the entry before) to " +
                                    std::to_string(high) + " (all rows)",
                       offsets[i][b]);
        }
    }
    const std::vector<int> used = fetch(options.seqused_k);
    for (size_t b = 0; b < used.size(); ++b) {
        const int64_t length = sizes.varlen ? offsets[1][b + 1] - offsets[1][b] : sizes.seqlen_k;
        if (used[b] < 0 || used[b] > length)
            refuse("seqused_k[" + std::to_string(b) + "]",
                   "from 0 to the sequence's " + std::to_string(length) + " keys", used[b]);
    }
    const std::pair<const char*, const std::optional<Tensor>&> descales[] = {
        {"q_descale", options.q_descale}, {"k_descale", options.k_descale}};
    for (int i = 0; i < 2 && sizes.varlen; ++i) {
        const auto& [name, descale] = descales[i];
        if (!descale || descale->dim() < 3) continue;
        for (size_t b = 0; b + 1 < offsets[i].size(); ++b) {
            const int length = offsets[i][b + 1] - offsets[i][b];
            const int64_t blocks = (length + kDescaleRows - 1) / kDescaleRows;
            if (descale->size(2) < blocks)
                refuse(name,
                       "of at least " + std::to_string(blocks) +
                           " blocks, those of the longest sequence",
                       shape_text(descale->sizes()));
        }
    }
    for (int i = 0; i < 2 && sizes.varlen && options.bias; ++i) {
        const int64_t reach = options.bias->size(2 + i);
        for (size_t b = 0; reach != 1 && b + 1 < offsets[i].size(); ++b)
            if (offsets[i][b + 1] - offsets[i][b] > reach)
                refuse("bias",
                       "as long as the longest sequence in dimension " + std::to_string(2 + i) +
                           ", at least " + std::to_string(offsets[i][b + 1] - offsets[i][b]),
                       reach);
    }
}

}  // namespace flash_ext
