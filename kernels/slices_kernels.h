// PoseidonSyncSlices and PoseidonDenseSlices on any device: slices_kernels.cc has what they do, slices_gpu.cc what is
// different on GPUs.

#ifndef POSEIDON_SLICES_KERNELS_H_
#define POSEIDON_SLICES_KERNELS_H_

#include <memory>
#include <string>

#include "exchange_kernels.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace poseidon {

// The variable whose rows slices are.
struct SlicedVariable {
  explicit SlicedVariable(tensorflow::OpKernelConstruction* context);

  tensorflow::TensorShape Rows(int64_t count) const;
  int64_t num_rows() const { return shape.dim_size(0); }
  int64_t columns() const { return num_rows() > 0 ? shape.num_elements() / num_rows() : 0; }
  absl::Status Check(const tensorflow::Tensor& indices, const tensorflow::Tensor& values) const;

  std::string name;
  tensorflow::TensorShape shape;
};

// Values are where the kernel works, indices on the host.
class SyncSlicesKernel : public ExchangeKernel {
 public:
  explicit SyncSlicesKernel(tensorflow::OpKernelConstruction* context);

  // Sorting takes a while, on the host: other ops of a GPU need not wait for it on the same thread.
  bool IsExpensive() override { return true; }

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override;

 private:
  struct Slices;

  absl::Status Allocate(tensorflow::OpKernelContext* context, int64_t count, Slices* slices) const;
  absl::Status SetSums(tensorflow::OpKernelContext* context, const std::shared_ptr<Slices>& mine) const;
  void SendDense(tensorflow::OpKernelContext* context, const Slices& mine, bool contributes, DoneCallback done) const;

  bool is_eager_ = false;
  const SlicedVariable variable_;
};

class DenseSlicesKernel : public tensorflow::OpKernel {
 public:
  explicit DenseSlicesKernel(tensorflow::OpKernelConstruction* context) : OpKernel(context), variable_(context) {}

  bool IsExpensive() override { return true; }  // as above

  void Compute(tensorflow::OpKernelContext* context) override;

 protected:
  virtual std::shared_ptr<OnDevice> Place(tensorflow::OpKernelContext*) const {
    return nullptr;
  }  // as ExchangeKernel's

 private:
  const SlicedVariable variable_;
};

}  // namespace poseidon

#endif  // POSEIDON_SLICES_KERNELS_H_
