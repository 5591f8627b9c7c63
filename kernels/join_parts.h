// Parts of a matrix, of which each rank has one, become the matrix on all ranks: for PoseidonJoinColumns and
// PoseidonGatherShards.

#ifndef POSEIDON_JOIN_PARTS_H_
#define POSEIDON_JOIN_PARTS_H_

#include "columns.h"
#include "communicator.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace poseidon {

// Exchanges `part`, this rank's, which is in the host's memory, as `factors` says, of which this fills in the parts.
// Sets output 0 to the matrix, of `shape`, and then calls `done`.
void JoinParts(tensorflow::OpKernelContext* context, Communicator* communicator, Factors factors,
               const tensorflow::Tensor& part, MatrixParts parts, const tensorflow::TensorShape& shape,
               tensorflow::AsyncOpKernel::DoneCallback done);

}  // namespace poseidon

#endif  // POSEIDON_JOIN_PARTS_H_
