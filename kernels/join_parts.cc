// Gathers the parts of a matrix, and puts them together.
//
// Tests: tests/communicator/test_half_factors.py, tests/communicator/test_shards.py.

#include "join_parts.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gathered_rows.h"

namespace poseidon {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using DoneCallback = tensorflow::AsyncOpKernel::DoneCallback;

struct Given {
  std::string site;
  Tensor part;
  MatrixParts parts;
  TensorShape shape;
  GatheredPart gathered;  // of all ranks, of each one
};

// Puts the parts together, on several threads: not on the progress thread, since that takes a while.
void PutTogether(OpKernelContext* context, const std::shared_ptr<const Given>& given, const DoneCallback& done) {
  Tensor* whole = nullptr;
  OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, given->shape, &whole), done);
  const size_t element_bytes = DataTypeSize(whole->dtype());
  const int64_t lines = given->parts.lines;
  for (size_t rank = 0; rank < given->gathered.size(); ++rank) {
    const size_t bytes = given->gathered[rank].bytes;
    const size_t expected = given->parts.ranges[rank].size() * element_bytes * lines;
    OP_REQUIRES_ASYNC(context, bytes == expected,
                      absl::InvalidArgumentError(
                          absl::StrCat("'", given->site, "' gets ", bytes, " bytes of rank ", rank, ", expected ",
                                       expected, ": build the same model on all ranks, and use the same types.")),
                      done);
  }
  if (whole->NumElements() == 0) return done();
  auto copy = [given, element_bytes, to = static_cast<char*>(whole->data()), line_bytes = whole->TotalBytes() / lines](
                  int64_t begin, int64_t end) {
    const std::vector<ColumnRange>& ranges = given->parts.ranges;
    for (int64_t line = begin; line < end; ++line) {
      for (size_t rank = 0; rank < ranges.size(); ++rank) {
        const size_t bytes = ranges[rank].size() * element_bytes;
        if (bytes == 0) continue;
        std::memcpy(to + line * line_bytes + ranges[rank].begin * element_bytes,
                    given->gathered[rank].data + line * bytes, bytes);
      }
    }
  };
  auto* workers = context->device()->tensorflow_cpu_worker_threads();
  const int64_t tasks = std::min<int64_t>(workers->num_threads, lines);
  auto left = std::make_shared<std::atomic<int64_t>>(tasks);
  for (int64_t task = 0; task < tasks; ++task) {
    workers->workers->Schedule([=] {
      copy(lines * task / tasks, lines * (task + 1) / tasks);
      if (--*left == 0) done();
    });
  }
}

}  // namespace

void JoinParts(OpKernelContext* context, Communicator* communicator, Factors factors, const Tensor& part,
               MatrixParts parts, const TensorShape& shape, DoneCallback done) {
  auto given = std::make_shared<Given>(Given{factors.site, part, std::move(parts), shape, {}});
  factors.parts.push_back({part.data(), part.TotalBytes(), static_cast<size_t>(DataTypeSize(part.dtype()))});
  communicator->SubmitFactors(
      std::move(factors), [context, given, done = std::move(done)](const std::string& error, GatheredFactors gathered) {
        if (!error.empty() || !gathered.is_complete) {
          new std::shared_ptr<Given>(given);  // the network may still use it
          context->SetStatus(error.empty()
                                 ? absl::InvalidArgumentError(absl::StrCat(
                                       "'", given->site, "' cannot be joined, since rank ", gathered.refused_by,
                                       " has another kind of part: build the same model on all ranks, and use the same "
                                       "types."))
                                 : absl::Status(absl::AbortedError(error)));
          return done();
        }
        given->gathered = std::move(gathered.parts[0]);
        PutTogether(context, given, done);
      });
}

}  // namespace poseidon
