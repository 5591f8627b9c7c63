// Registers kernels for GPUs, unless the machine's driver is too old for the CUDA that they were compiled by. Then
// nodes are placed as by a library that was built without them.

#ifndef POSEIDON_GPU_REGISTRATION_H_
#define POSEIDON_GPU_REGISTRATION_H_

#include "cuda/copies.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace poseidon {

// `definition` says for which op and types, as for REGISTER_KERNEL_BUILDER.
template <class Kernel>
bool RegisterOnGpu(tensorflow::KernelDefBuilder& definition, const char* name) {
  const tensorflow::KernelDef* const kernel = definition.Device(tensorflow::DEVICE_GPU).Build();
  int driver, compiler;
  if (poseidon_is_driver_too_old(&driver, &compiler)) {
    delete kernel;
    return false;
  }
  tensorflow::kernel_factory::OpKernelRegistrar(
      kernel, name,
      [](tensorflow::OpKernelConstruction* context) -> tensorflow::OpKernel* { return new Kernel(context); });
  return true;
}

}  // namespace poseidon

#endif  // POSEIDON_GPU_REGISTRATION_H_
