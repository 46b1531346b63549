//===- DLPack.h - The DLPack exchange structures ----------------*- C++ -*-===//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//===----------------------------------------------------------------------===//
///
/// \file
/// Declares the part of the public DLPack binary interface that COREY uses to
/// exchange tensors with other frameworks: the unversioned `DLManagedTensor`.
/// Include a real <dlpack/dlpack.h> (0.5 or newer) before this header and this
/// one declares nothing, so that both can be used in one translation unit.
///
//===----------------------------------------------------------------------===//

#ifndef COREY_DLPACK_H
#define COREY_DLPACK_H

// Releases before 1.0 define DLPACK_VERSION, later ones DLPACK_MAJOR_VERSION;
// the include guard has been the same in all of them.
#if !defined(DLPACK_VERSION) && !defined(DLPACK_MAJOR_VERSION) &&              \
    !defined(DLPACK_DLPACK_H_)

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/// Where a tensor's memory lies. Other values exist and are passed through the
/// interface unnamed.
#ifdef __cplusplus
typedef enum : int32_t {
#else
typedef enum {
#endif
  kDLCPU = 1,
  kDLCUDA = 2,
} DLDeviceType;

/// One device: its type and its zero-based number among those of that type.
typedef struct DLDevice {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;

/// The values of `DLDataType::code`.
typedef enum {
  kDLInt = 0,
  kDLUInt = 1,
  kDLFloat = 2,
  kDLBfloat = 4,
  kDLBool = 6,
  kDLFloat8_e4m3fn = 10,
} DLDataTypeCode;

/// The type of one element: `lanes` values of `bits` bits each.
typedef struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;

/// A tensor without ownership. `strides` counts elements, and null stands for
/// row-major contiguous; the first element is at `data` + `byte_offset` bytes.
typedef struct DLTensor {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
} DLTensor;

/// A tensor with its owner. The consumer calls `deleter`, if not null, once
/// with the structure's own address when it no longer needs the tensor.
typedef struct DLManagedTensor {
  DLTensor dl_tensor;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;

#ifdef __cplusplus
} // extern "C"
#endif

#endif // No real dlpack.h

#endif // COREY_DLPACK_H
