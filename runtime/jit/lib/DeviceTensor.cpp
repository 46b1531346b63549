//===- DeviceTensor.cpp - Tensors in device memory ------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Device/CUDA.h"
#include "corey/Tensor.h"
#include <algorithm>

using namespace corey;

Expected<Tensor> Tensor::empty(DType Type, std::vector<int64_t> Shape,
                               Device Dev, bool ZeroInit) {
  if (Dev.kind == Device::CPU)
    return empty(Type, std::move(Shape), ZeroInit);
  Expected<int64_t> Elements = countElements(Shape);
  int64_t Bytes = 0;
  if (!Elements)
    return Elements.takeStatus();
  if (__builtin_mul_overflow(*Elements, static_cast<int64_t>(dtypeSize(Type)),
                             &Bytes))
    return Status::invalidArgument(
        "size in bytes overflows; expected at most 9223372036854775807, got "
        "more");
  Expected<std::shared_ptr<cuda::Device>> Owner = cuda::Device::get(Dev.index);
  if (!Owner)
    return Owner.takeStatus();
  Expected<void *> Memory =
      (*Owner)->allocate(std::max<size_t>(static_cast<size_t>(Bytes), 1));
  if (!Memory)
    return Memory.takeStatus();
  std::shared_ptr<void> Storage(
      *Memory, [Device = *Owner](void *Data) { Device->deallocate(Data); });
  if (ZeroInit) {
    if (Status S = (*Owner)->memset(*Memory, 0, static_cast<size_t>(Bytes),
                                    /*stream=*/nullptr);
        !S)
      return S;
    if (Status S = (*Owner)->synchronize(); !S)
      return S;
  }
  return view(*Memory, Type, std::move(Shape), {}, Dev, std::move(Storage));
}

Expected<Tensor> Tensor::to(Device NewDevice) const {
  Expected<Tensor> Result = empty(Type, Shape, NewDevice);
  if (!Result)
    return Result;
  if (Status S = Result->copyFrom(*this); !S)
    return S;
  return Result;
}

/// Copies between tensors of one shape and dtype, of which one or both are on
/// a CUDA device, behind all work that the device has.
Status Tensor::copyAcross(const Tensor &Src) const {
  if (Type != Src.Type)
    return Status::unsupported(
        "cannot copy " + Src.describe() + " to " + describe() +
        "; expected one dtype where a device takes part, got two");
  if (numElements() == 0)
    return Status::ok();
  std::shared_ptr<cuda::Device> To, From;
  for (auto [T, Owner] :
       {std::pair<const Tensor *, std::shared_ptr<cuda::Device> *>{this, &To},
        {&Src, &From}}) {
    if (T->Dev.kind == Device::CPU)
      continue;
    Expected<std::shared_ptr<cuda::Device>> Found =
        cuda::Device::get(T->Dev.index);
    if (!Found)
      return Found.takeStatus();
    *Owner = std::move(*Found);
    // Whoever wrote the source or reads the target is done then.
    if (Status S = (*Owner)->synchronize(); !S)
      return S;
  }
  size_t Bytes = static_cast<size_t>(numBytes());
  // The default stream, which is waited for.
  void *Stream = nullptr;
  Status S;
  if (To && From == To) {
    if (overlaps(Src)) {
      Expected<Tensor> Temporary = Src.to(Src.Dev);
      return Temporary ? copyAcross(*Temporary) : Temporary.takeStatus();
    }
    S = To->copyStrided(Data, Strides.data(), Src.Data, Src.Strides.data(),
                        Shape.data(), Shape.size(), dtypeSize(Type), Stream);
  } else if (!Src.isContiguous()) {
    Expected<Tensor> Packed = Src.to(Src.Dev);
    return Packed ? copyAcross(*Packed) : Packed.takeStatus();
  } else if (!isContiguous()) {
    Expected<Tensor> Packed = Src.to(Dev);
    return Packed ? copyFrom(*Packed) : Packed.takeStatus();
  } else if (To && From) {
    S = To->copyFromPeer(Data, *From, Src.Data, Bytes, Stream);
  } else if (To) {
    S = To->copyToDevice(Data, Src.Data, Bytes, Stream);
  } else {
    S = From->copyToHost(Data, Src.Data, Bytes, Stream);
  }
  return S ? (To ? To : From)->synchronize() : S;
}
