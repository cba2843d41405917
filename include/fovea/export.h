#pragma once

// Symbols are hidden by default; FOVEA_API marks what the shared library exports.
#if defined(_WIN32)
#define FOVEA_API
#else
#define FOVEA_API __attribute__((visibility("default")))
#endif

/// Marks small functions that kernels share with the host, so that both compute the same bits.
#if defined(__CUDACC__)
#define FOVEA_HOST_DEVICE __host__ __device__
#else
#define FOVEA_HOST_DEVICE
#endif
