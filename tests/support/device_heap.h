#pragma once

#include <cstddef>

/// Host memory that a GPU can use at its own address, so that a test runs an operator on the
/// device with the tensors, guards and comparisons that it has for the CPU.
namespace fovea::test {

/// Where a GPU is present: everything that operator new gives from now on is mapped into it, and a
/// launch returns when its kernel is done. Called once, first thing in main(). Without a GPU it
/// does nothing.
void use_device_heap();

/// Maps other host memory (whole pages); false without a GPU.
bool map_for_device(void* data, size_t bytes);
void unmap_for_device(void* data);

/// For operator new and delete. Null, false: not from this heap.
void* device_heap_allocate(size_t bytes, size_t alignment);
bool device_heap_release(void* data);

}  // namespace fovea::test
