// Loads whole tiles by TMA, each into a stage of a pipeline, once the stage is empty.
#pragma once

#include "tile/pipeline.cuh"
#include "tile/tensor_map.cuh"

namespace flash_ext {

// A tile that begins at row first_row, and what comes with it: each of more() describes a load, as
// RowStatisticsLoad, after the tile has been requested, since producers have few registers.
template <class Tile, int kBoxRows = Tile::kRows, class Pipeline, class... More>
FLASH_DEVICE void load_tile(const Pipeline& pipeline, const typename Pipeline::State& state,
                            const CUtensorMap& map, const TensorRows& rows, int first_row,
                            More... more) {
    pipeline.producer_acquire(state);
    pipeline.producer_expect(state, (Tile::kBytes + ... + decltype(more())::kBytes));
    rows.load<Tile, kBoxRows>(map, pipeline.stage(state), pipeline.full(state), first_row);
    (more().load(pipeline.full(state)), ...);
}

// A number per row of a tile, such as lse: the first `stored` ones from `source` on, and the others
// from `padding` on.
template <class Number, int kRows>
struct RowStatisticsLoad {
    Number (&target)[kRows];
    const Number* source;
    const Number* padding;
    int stored;

    static constexpr int kBytes = kRows * sizeof(Number);

    FLASH_DEVICE void load(uint32_t full) const {
        const auto copy = [&](int first, const Number* from, int rows) {
            if (rows > 0)
                ptx::bulk_load(ptx::shared_address(target) + first * int{sizeof(Number)}, from,
                               rows * int{sizeof(Number)}, full);
        };
        copy(0, source, stored);
        copy(stored, padding, kRows - stored);
    }
};

}  // namespace flash_ext
