// The kernel of PoseidonTurnEnd on any device: turn_ops.cc has that of the CPU, turn_gpu.cc that of GPUs.

#ifndef POSEIDON_TURN_KERNELS_H_
#define POSEIDON_TURN_KERNELS_H_

#include <functional>

#include "tensorflow/core/framework/op_kernel.h"
#include "turns.h"

namespace poseidon {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

class TurnEndKernel : public tensorflow::OpKernel {
 public:
  explicit TurnEndKernel(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("turn", &turn_));
  }

  bool IsExpensive() override { return false; }

  void Compute(OpKernelContext* context) override {
    if (const auto turns = ProcessTurns()) turns->End(context->step_id(), turn_, Completion(context));
  }

 protected:
  // Whether what the device was given before is done; null if nothing is left to do.
  virtual std::function<bool()> Completion(OpKernelContext* context) const = 0;

 private:
  int64_t turn_;
};

}  // namespace poseidon

#endif  // POSEIDON_TURN_KERNELS_H_
