// GPU kernels of PoseidonSend and PoseidonRecv: tensors stay in the GPU's memory, from and to which the communicator
// copies them in pieces; factors of all ranks are put together in TensorFlow's stream. Compiled only where there is
// CUDA to compile it with. The tests run the same with an emulated GPU: these lines need a real one.
//
// Tests: tests/communicator/test_staging.py, tests/graphs/test_placement.py.

#include <functional>
#include <memory>

#include "gathered_rows.h"
#include "gpu_registration.h"
#include "on_gpu.h"
#include "send_recv_kernels.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace poseidon {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::register_kernel::Name;

class GpuSendKernel : public SendKernel {
 public:
  using SendKernel::SendKernel;

 protected:
  std::shared_ptr<OnDevice> Place(OpKernelContext* context) const override { return PlaceOnGpu(context); }
};

class GpuRecvKernel : public RecvKernel {
 public:
  using RecvKernel::RecvKernel;

 protected:
  void AwaitSum(OpKernelContext* context, const Ticket& ticket, std::function<void()> then) override {
    AwaitOnGpu(context, *ticket.on_device());
    then();
  }

  void CopyFactor(OpKernelContext* context, const std::shared_ptr<Ticket>& ticket, size_t factor,
                  char* output) override {
    CopyRowsToGpu(ticket->gathered().parts[factor], ticket->on_device()->device, StreamOf(context), ticket, output);
  }
};

[[maybe_unused]] const bool kRegistered[] = {
    RegisterOnGpu<GpuSendKernel>(Name("PoseidonSend").HostMemory("contributes").HostMemory("ticket"), "GpuSendKernel"),
    RegisterOnGpu<GpuRecvKernel>(Name("PoseidonRecv").HostMemory("ticket").HostMemory("complete"), "GpuRecvKernel"),
};

}  // namespace
}  // namespace poseidon
