// Loads whole tiles by TMA, each into a stage of a pipeline, once the stage is empty.
#pragma once

#include "tile/pipeline.cuh"
#include "tile/tensor_map.cuh"

namespace flash_ext {

// A tile that begins at row first_row.
template <class Tile, int kBoxRows = Tile::kRows, class Pipeline>
__device__ __forceinline__ void load_tile(const Pipeline& pipeline,
                                          const typename Pipeline::State& state,
                                          const CUtensorMap& map, const TensorRows& rows,
                                          int first_row) {
    pipeline.producer_acquire(state);
    pipeline.producer_expect(state, Tile::kBytes);
    rows.load<Tile, kBoxRows>(map, pipeline.stage(state), pipeline.full(state), first_row);
}

// The same, with a number per row, such as lse, which goes with the tile.
template <class Tile, class Pipeline, class Number>
__device__ __forceinline__ void load_tile(const Pipeline& pipeline,
                                          const typename Pipeline::State& state,
                                          const CUtensorMap& map, const TensorRows& rows,
                                          int first_row, Number (&statistics)[Tile::kRows],
                                          const Number* source) {
    pipeline.producer_acquire(state);
    pipeline.producer_expect(state, Tile::kBytes + sizeof(statistics));
    rows.load<Tile>(map, pipeline.stage(state), pipeline.full(state), first_row);
    ptx::bulk_load(ptx::shared_address(statistics), source + first_row, sizeof(statistics),
                   pipeline.full(state));
}

}  // namespace flash_ext
