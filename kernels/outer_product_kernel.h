// What the kernels of SufficientFactorOuterProduct and SufficientFactorBias have in common, on the CPU and on GPUs.

#ifndef POSEIDON_OUTER_PRODUCT_KERNEL_H_
#define POSEIDON_OUTER_PRODUCT_KERNEL_H_

#include <string>

#include "tensorflow/core/framework/op_kernel.h"

namespace poseidon {

// Checks types and shapes, and allocates the product; `Multiply` computes it.
class OuterProductKernel : public tensorflow::OpKernel {
 public:
  explicit OuterProductKernel(tensorflow::OpKernelConstruction* context);
  void Compute(tensorflow::OpKernelContext* context) final;

 protected:
  // Writes U^T V of u [K, M] and v [K, N] to out [M, N], which is not empty; K may be 0.
  virtual void Multiply(tensorflow::OpKernelContext* context, const tensorflow::Tensor& u, const tensorflow::Tensor& v,
                        tensorflow::Tensor* out) = 0;

  const std::string site_;  // whose gradient it makes
};

// Checks types and shapes, and allocates the sum of rows; `Sum` computes it.
class BiasKernel : public tensorflow::OpKernel {
 public:
  explicit BiasKernel(tensorflow::OpKernelConstruction* context);
  void Compute(tensorflow::OpKernelContext* context) final;

 protected:
  // Writes the sum of the rows of v [K, N] to out [N]; K and N may be 0.
  virtual void Sum(tensorflow::OpKernelContext* context, const tensorflow::Tensor& v, tensorflow::Tensor* out) = 0;

  const std::string site_;  // whose gradient it makes
};

}  // namespace poseidon

#endif  // POSEIDON_OUTER_PRODUCT_KERNEL_H_
