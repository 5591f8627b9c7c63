// What an inserted node is there for, as graph_passes/graph/provenance.py writes it.

#ifndef POSEIDON_PROVENANCE_H_
#define POSEIDON_PROVENANCE_H_

#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace poseidon {

// Returns the site whose gradient a node makes; "" of a node that no pass has inserted.
inline std::string SiteOf(tensorflow::OpKernelConstruction* context) {
  std::string text;
  if (!context->GetAttr("_poseidon_inserted", &text).ok()) return "";
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  return lines.size() > 2 && lines[0] == "1" ? lines[2] : "";
}

}  // namespace poseidon

#endif  // POSEIDON_PROVENANCE_H_
