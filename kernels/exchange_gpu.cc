// GPU kernels of PoseidonSync, PoseidonAllReduce, PoseidonBroadcast, PoseidonAllGather and the ops of shards: tensors
// stay in the GPU's memory, from and to which the communicator copies them in pieces; other ranks' rows come up in
// TensorFlow's stream. Compiled only where there is CUDA to compile it with. Integers are exchanged on the host, where
// TensorFlow has them. The tests run the same with an emulated GPU.
//
// Tests: tests/communicator/test_staging.py, tests/graphs/test_placement.py.

#include <memory>

#include "exchange_kernels.h"
#include "gathered_rows.h"
#include "gpu_registration.h"
#include "on_gpu.h"
#include "shard_kernels.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace poseidon {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::register_kernel::Name;

class GpuGatherKernel : public OnGpu<GatherKernel> {
 public:
  using OnGpu<GatherKernel>::OnGpu;

 protected:
  void Concatenate(OpKernelContext* context, const std::shared_ptr<Given>& given, char* output) const override {
    CopyRowsToGpu(given->part, given->place->device, StreamOf(context), given, output);
  }
};

class GpuShardKernel : public ShardKernel {
 public:
  using ShardKernel::ShardKernel;

 protected:
  std::shared_ptr<OnDevice> Place(OpKernelContext* context) const override { return PlaceOnGpu(context); }
};

template <class T>
bool Register() {
  return RegisterOnGpu<OnGpu<SyncKernel>>(Name("PoseidonSync").HostMemory("contributes").TypeConstraint<T>("T"),
                                          "GpuSyncKernel") &&
         RegisterOnGpu<OnGpu<SumKernel>>(Name("PoseidonAllReduce").HostMemory("contributes").TypeConstraint<T>("T"),
                                         "GpuSumKernel") &&
         RegisterOnGpu<GpuGatherKernel>(Name("PoseidonAllGather").HostMemory("contributes").TypeConstraint<T>("T"),
                                        "GpuGatherKernel") &&
         RegisterOnGpu<OnGpu<BroadcastKernel>>(Name("PoseidonBroadcast").TypeConstraint<T>("T"),
                                               "GpuBroadcastKernel") &&
         RegisterOnGpu<GpuShardKernel>(Name("PoseidonShard").TypeConstraint<T>("T"), "GpuShardKernel") &&
         RegisterOnGpu<OnGpu<ReduceScatterKernel>>(
             Name("PoseidonReduceScatter").HostMemory("contributes").TypeConstraint<T>("T"),
             "GpuReduceScatterKernel") &&
         RegisterOnGpu<OnGpu<GatherShardsKernel>>(Name("PoseidonGatherShards").TypeConstraint<T>("T"),
                                                  "GpuGatherShardsKernel");
}

[[maybe_unused]] const bool kRegistered[] = {Register<float>(), Register<double>(), Register<Eigen::half>(),
                                             Register<tensorflow::bfloat16>()};

}  // namespace
}  // namespace poseidon
