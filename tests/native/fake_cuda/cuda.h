// What csrc takes of the CUDA driver: tensor maps. An encoded one holds the arguments.
#pragma once

#include <cstdint>

#include "cuda_runtime.h"

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_CONTEXT = 201 };
enum CUtensorMapDataType {
    CU_TENSOR_MAP_DATA_TYPE_UINT8,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle {
    CU_TENSOR_MAP_SWIZZLE_NONE,
    CU_TENSOR_MAP_SWIZZLE_32B,
    CU_TENSOR_MAP_SWIZZLE_64B,
    CU_TENSOR_MAP_SWIZZLE_128B
};
enum CUtensorMapL2promotion {
    CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
    CU_TENSOR_MAP_L2_PROMOTION_L2_256B
};
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

struct CUtensorMap {
    CUtensorMapDataType type;
    uint32_t rank;
    void* address;
    uint64_t sizes[5], strides[4];  // strides in bytes, of all dimensions but the first
    uint32_t box[5];
    CUtensorMapSwizzle swizzle;

    int box_bytes() const {
        int bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8     ? 1
                    : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4
                                                              : 2;
        for (uint32_t i = 0; i < rank; ++i) bytes *= box[i];
        return bytes;
    }
};

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, uint32_t rank,
                                       void* address, const uint64_t* sizes,
                                       const uint64_t* strides, const uint32_t* box,
                                       const uint32_t* /*element_strides*/, CUtensorMapInterleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                       CUtensorMapFloatOOBfill) {
    *map = {.type = type, .rank = rank, .address = address, .swizzle = swizzle};
    for (uint32_t i = 0; i < rank; ++i) {
        map->sizes[i] = sizes[i];
        map->box[i] = box[i];
        if (i > 0) map->strides[i - 1] = strides[i - 1];
    }
    return CUDA_SUCCESS;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, int, int,
                                                    cudaDriverEntryPointQueryResult* found) {
    *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
