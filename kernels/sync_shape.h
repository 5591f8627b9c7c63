// The shape function of PoseidonSync, and of the way up alone.

#ifndef POSEIDON_SYNC_SHAPE_H_
#define POSEIDON_SYNC_SHAPE_H_

#include "tensorflow/core/framework/shape_inference.h"

namespace poseidon {

// Checks the inputs `gradient` and `contributes`; the first output has the gradient's shape, as far as it is known.
inline absl::Status SyncShape(tensorflow::shape_inference::InferenceContext* c) {
  tensorflow::PartialTensorShape partial;
  tensorflow::shape_inference::ShapeHandle scalar, known, merged;
  TF_RETURN_IF_ERROR(c->GetAttr("shape", &partial));
  TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(partial, &known));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &scalar));
  TF_RETURN_IF_ERROR(c->Merge(c->input(0), known, &merged));
  c->set_output(0, merged);
  return absl::OkStatus();
}

}  // namespace poseidon

#endif  // POSEIDON_SYNC_SHAPE_H_
