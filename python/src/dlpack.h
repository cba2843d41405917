#pragma once

#include <cstdint>

/// The structs of DLPack, with which arrays change hands between Python packages: the unversioned
/// form and that of major version 1. Layout and numbers are those of the DLPack specification.
namespace fovea::python {

enum DlDeviceType : int32_t {
  kDlCpu = 1,
  kDlCuda = 2,
  kDlCudaHost = 3,  // pinned memory of the host
  kDlCudaManaged = 13,
};

struct DlDevice {
  int32_t type;
  int32_t id;
};

enum DlTypeCode : uint8_t {
  kDlInt = 0,
  kDlUInt = 1,
  kDlFloat = 2,
  kDlBfloat = 4,
  kDlBool = 6,
  kDlFloat8E4m3fn = 10,
};

struct DlDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DlTensor {
  void* data;
  DlDevice device;
  int32_t ndim;
  DlDataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: packed
  uint64_t byte_offset;
};

/// In a capsule named "dltensor"; "used_dltensor" once its consumer owns it.
struct DlManagedTensor {
  DlTensor tensor;
  void* manager_context;
  void (*deleter)(DlManagedTensor* self);
};

struct DlVersion {
  uint32_t major;
  uint32_t minor;
};

inline constexpr uint64_t kDlReadOnly = 1;

/// In a capsule named "dltensor_versioned"; "used_dltensor_versioned" once its consumer owns it.
struct DlManagedTensorVersioned {
  DlVersion version;
  void* manager_context;
  void (*deleter)(DlManagedTensorVersioned* self);
  uint64_t flags;
  DlTensor tensor;
};

/// What a package's tensor type offers in its attribute __dlpack_c_exchange_api__, a capsule named
/// "dlpack_exchange_api": exchange without calls of Python. Functions return 0, or -1 with a Python
/// exception. Of the struct of version 1 the functions that are not used stand as addresses.
struct DlExchangeApi {
  DlVersion version;
  DlExchangeApi* previous;  // of an older major version, or null
  void* managed_tensor_allocator;
  int (*managed_tensor_from_object)(void* object, DlManagedTensorVersioned** out);
  void* managed_tensor_to_object;
  /// Optional: what `object` is now, not kept by the result.
  int (*tensor_from_object)(void* object, DlTensor* out);
  int (*current_work_stream)(DlDeviceType type, int32_t id, void** out);
};

}  // namespace fovea::python
