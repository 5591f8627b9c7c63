// The GPU kernel of PoseidonTurnEnd: a turn ends when the work in TensorFlow's stream has come so far. Compiled only
// where there is CUDA to compile it with.
//
// Tests: tests/native/turns_test.cc.

#include <functional>
#include <memory>

#include "gpu_registration.h"
#include "on_gpu.h"
#include "turn_kernels.h"

namespace poseidon {
namespace {

class GpuTurnEndKernel : public TurnEndKernel {
 public:
  using TurnEndKernel::TurnEndKernel;

 protected:
  std::function<bool()> Completion(OpKernelContext* context) const override {
    return [place = PlaceOnGpu(context)] { return place->device->IsDone(place->complete); };
  }
};

[[maybe_unused]] const bool kRegistered = [] {
  tensorflow::register_kernel::Name definition("PoseidonTurnEnd");
  return RegisterOnGpu<GpuTurnEndKernel>(definition, "GpuTurnEndKernel");
}();

}  // namespace
}  // namespace poseidon
