// A kernel's place in TensorFlow's stream of its GPU. For files that are compiled only where there is CUDA.

#ifndef POSEIDON_ON_GPU_H_
#define POSEIDON_ON_GPU_H_

#include <functional>
#include <memory>

#include "cuda/copies.h"
#include "device.h"
#include "staging.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "xla/stream_executor/stream.h"

namespace poseidon {

inline Device::Stream StreamOf(tensorflow::OpKernelContext* context) {
  return context->op_device_context()->stream()->platform_specific_handle().stream;
}

// Where tensors are that are computed by what has been put into the stream.
inline std::shared_ptr<OnDevice> PlaceOnGpu(tensorflow::OpKernelContext* context) {
  Device* const device = CudaDevice(context->device()->tensorflow_accelerator_device_info()->gpu_id);
  const Device::Stream stream = StreamOf(context);
  return std::make_shared<OnDevice>(device, stream, device->Record(stream));
}

// Lets ops that follow read what has come to the GPU.
inline void AwaitOnGpu(tensorflow::OpKernelContext* context, const OnDevice& place) {
  place.device->Wait(StreamOf(context), place.complete);
}

// A kernel of exchange_kernels.h, or one derived from it, on a GPU.
template <class Kernel>
class OnGpu : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  std::shared_ptr<OnDevice> Place(tensorflow::OpKernelContext* context) const override { return PlaceOnGpu(context); }

  void Await(tensorflow::OpKernelContext* context, const OnDevice& place, std::function<void()> then) const override {
    AwaitOnGpu(context, place);
    then();
  }
};

}  // namespace poseidon

#endif  // POSEIDON_ON_GPU_H_
