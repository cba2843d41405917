#pragma once

#include <cstddef>

/// Host memory for workspaces and scratch arrays.
namespace fovea::internal {

/// Uninitialised, 64-byte aligned; from 8 MiB on with the advice to use huge pages, which rows
/// gathered from a pool need to arrive fast. Null when the system refuses.
void* allocate_host(size_t bytes) noexcept;
void release_host(void* data) noexcept;

}  // namespace fovea::internal
