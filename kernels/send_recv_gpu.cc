// GPU kernels of PoseidonSend and PoseidonRecv: tensors stay in the GPU's memory, from and to which the communicator
// copies them in pieces; factors of other ranks come up in TensorFlow's stream. Compiled only where there is CUDA to
// compile it with. The tests run the same with an emulated GPU: these lines need a real one.
//
// Tests: tests/communicator/test_staging.py, tests/graphs/test_placement.py.

#include <functional>
#include <memory>
#include <utility>

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
    Device* const device = ticket->on_device()->device;
    const Device::Stream stream = StreamOf(context);
    for (const GatheredFactors::Rows& rows : ticket->gathered().parts[factor]) {
      if (rows.bytes == 0) continue;
      if (rows.is_own) {
        device->Copy(stream, output, ticket->inputs()[factor].data(), rows.bytes);
      } else if (rows.element_bytes > 0) {  // of a rank that has left out its zeros
        std::shared_ptr<char[]> whole(new char[rows.bytes]);
        rows.CopyTo(whole.get());
        device->Copy(stream, output, whole.get(), rows.bytes);
        device->KeepUntilDone(stream, std::move(whole));
      } else {
        device->Copy(stream, output, rows.data, rows.bytes);
      }
      output += rows.bytes;
    }
    device->KeepUntilDone(stream, ticket);  // which holds the memory that is copied from
  }
};

[[maybe_unused]] const bool kRegistered[] = {
    RegisterOnGpu<GpuSendKernel>(Name("PoseidonSend").HostMemory("contributes").HostMemory("ticket"), "GpuSendKernel"),
    RegisterOnGpu<GpuRecvKernel>(Name("PoseidonRecv").HostMemory("ticket").HostMemory("complete"), "GpuRecvKernel"),
};

}  // namespace
}  // namespace poseidon
