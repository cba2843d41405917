#pragma once

#include <cstdint>

/// The loops behind measure_ceilings(). Each returns a value that depends on all its work, so that
/// none of it can be left out.
namespace fovea::internal {

/// Runs `iterations` rounds of fp32 multiply-adds on independent chains and reports the number of
/// operations (a multiply-add is two).
float run_fma_chains(int64_t iterations, int64_t* num_flops);

/// The same with AVX512-BF16 dot products. Only when current_cpu_isa() >= kAvx512Bf16.
float run_bf16_dots(int64_t iterations, int64_t* num_flops);

/// Reads `bytes` (a multiple of 1024) from a 64-byte aligned address.
uint64_t read_stream(const uint8_t* data, int64_t bytes);

/// Copies `bytes` (a multiple of 1024) between 64-byte aligned addresses with stores that bypass
/// the caches where the CPU has them.
void copy_stream(const uint8_t* from, uint8_t* to, int64_t bytes);

/// Reads the rows listed in `rows` (each `row_bytes` long, a multiple of 16), asking for each row
/// `rows_ahead` rows before it is read (0: not at all).
uint64_t read_rows(const uint8_t* pool, int64_t row_bytes, const int32_t* rows, int64_t num_rows,
                   int64_t rows_ahead);

}  // namespace fovea::internal
