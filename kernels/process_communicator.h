// How kernels find the communicator of their process.

#ifndef POSEIDON_PROCESS_COMMUNICATOR_H_
#define POSEIDON_PROCESS_COMMUNICATOR_H_

#include <string>

#include "c_api.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace poseidon {

// Returns the communicator of this process; fails the op and returns null if it is in no job.
inline Communicator* CommunicatorOf(tensorflow::OpKernelContext* context,
                                    const tensorflow::OpKernel& op, const std::string& site) {
  Communicator* communicator = ProcessCommunicator();
  if (!communicator) {
    context->SetStatus(absl::FailedPreconditionError(absl::StrCat(
        op.type_string(), " '", site, "' runs outside a job; create a "
        "tf_poseidon.PoseidonStrategy, or call tf_poseidon.load_ops(), in this process first.")));
  }
  return communicator;
}

}  // namespace poseidon

#endif  // POSEIDON_PROCESS_COMMUNICATOR_H_
