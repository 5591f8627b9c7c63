// PoseidonShard, PoseidonReduceScatter and PoseidonGatherShards on any device: shard_kernels.cc has those of the CPU,
// exchange_gpu.cc those of GPUs. What a shard is, kv_pairs.h says. And PoseidonReduceScatterRows, on the CPU.

#ifndef POSEIDON_SHARD_KERNELS_H_
#define POSEIDON_SHARD_KERNELS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "columns.h"
#include "exchange_kernels.h"
#include "kv_pairs.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace poseidon {

// How the ops of one variable divide its tensors, by their attributes: into KV pairs, or as matrices into columns or
// rows.
class ShardAttributes {
 public:
  explicit ShardAttributes(tensorflow::OpKernelConstruction* context);

  const ShardLayout& layout() const { return layout_; }
  bool is_of_matrix() const { return divided_ >= 0; }

  // What this rank owns of a tensor: of each of `lines` of elements, all of the same length, these pieces, in bytes.
  struct Own {
    int64_t lines = 1;
    std::vector<KvPair> pieces;
    int64_t elements = 0;  // of all lines
  };

  // Fails the op and returns none if there is no such rank as the owner, or the tensor is no such matrix.
  std::optional<Own> OwnOf(tensorflow::OpKernelContext* context, const tensorflow::OpKernel& op,
                           const std::string& site, int64_t elements, tensorflow::DataType dtype) const;

  // The parts of a matrix of so many elements.
  MatrixParts PartsOf(const Communicator& communicator, int64_t elements) const;

  // What must be equal of ranks that join these parts.
  std::string form() const;

 private:
  ShardLayout layout_;
  int divided_ = -1;     // the dimension of a matrix that is divided; -1: see layout_
  int64_t columns_ = 0;  // of the matrix
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

class ColumnRangeKernel : public tensorflow::OpKernel {
 public:
  explicit ColumnRangeKernel(tensorflow::OpKernelConstruction* context);
  bool IsExpensive() override { return false; }
  void Compute(tensorflow::OpKernelContext* context) override;

 private:
  int64_t columns_;
};

class ReduceScatterKernel : public SyncKernel {
 public:
  explicit ReduceScatterKernel(tensorflow::OpKernelConstruction* context);
  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override;

 private:
  const ShardAttributes attributes_;
};

class ReduceScatterRowsKernel : public ExchangeKernel {
 public:
  explicit ReduceScatterRowsKernel(tensorflow::OpKernelConstruction* context);
  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override;

 private:
  // Sets the sum of the rows of all ranks, which must divide dimension 0.
  absl::Status CountRows(const tensorflow::Tensor& summand, const tensorflow::Tensor& counts, int ranks,
                         int64_t* total) const;

  const Shown shown_;
};

class GatherShardsKernel : public ExchangeKernel {
 public:
  explicit GatherShardsKernel(tensorflow::OpKernelConstruction* context);
  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override;

 private:
  void Join(tensorflow::OpKernelContext* context, DoneCallback done);

  const ShardAttributes attributes_;
  const Shown shown_;
  tensorflow::TensorShape shape_;
};

}  // namespace poseidon

#endif  // POSEIDON_SHARD_KERNELS_H_
