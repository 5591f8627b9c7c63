// PoseidonShard, PoseidonReduceScatter and PoseidonGatherShards on any device: shard_kernels.cc has those of the CPU,
// exchange_gpu.cc those of GPUs. What a shard is, kv_pairs.h says.

#ifndef POSEIDON_SHARD_KERNELS_H_
#define POSEIDON_SHARD_KERNELS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "exchange_kernels.h"
#include "kv_pairs.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace poseidon {

// How the ops of one variable divide its tensors, by their attributes.
class ShardAttributes {
 public:
  explicit ShardAttributes(tensorflow::OpKernelConstruction* context);

  const ShardLayout& layout() const { return layout_; }

  // The KV pairs of a tensor that this rank owns, and how many elements they are.
  struct Own {
    std::vector<KvPair> pairs;
    int64_t elements;
  };

  // Fails the op and returns none if there is no such rank as the owner.
  std::optional<Own> OwnOf(tensorflow::OpKernelContext* context, const tensorflow::OpKernel& op,
                           const std::string& site, int64_t elements, tensorflow::DataType dtype) const;

 private:
  ShardLayout layout_;
};

class ShardKernel : public tensorflow::OpKernel {
 public:
  explicit ShardKernel(tensorflow::OpKernelConstruction* context) : OpKernel(context), attributes_(context) {}
  void Compute(tensorflow::OpKernelContext* context) override;

 protected:
  // Same as in ExchangeKernel.
  virtual std::shared_ptr<OnDevice> Place(tensorflow::OpKernelContext*) const { return nullptr; }

 private:
  const ShardAttributes attributes_;
};

class ShardSizeKernel : public tensorflow::OpKernel {
 public:
  explicit ShardSizeKernel(tensorflow::OpKernelConstruction* context);
  void Compute(tensorflow::OpKernelContext* context) override;

 private:
  const ShardAttributes attributes_;
  int64_t elements_;
};

class ReduceScatterKernel : public SyncKernel {
 public:
  explicit ReduceScatterKernel(tensorflow::OpKernelConstruction* context);
  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override;

 private:
  const ShardAttributes attributes_;
};

class GatherShardsKernel : public ExchangeKernel {
 public:
  explicit GatherShardsKernel(tensorflow::OpKernelConstruction* context);
  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override;

 private:
  const ShardAttributes attributes_;
  const Shown shown_;
  tensorflow::TensorShape shape_;
};

}  // namespace poseidon

#endif  // POSEIDON_SHARD_KERNELS_H_
