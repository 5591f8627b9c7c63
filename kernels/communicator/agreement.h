// Compares once, across ranks, what a training function synchronises and how.

#ifndef POSEIDON_COMMUNICATOR_AGREEMENT_H_
#define POSEIDON_COMMUNICATOR_AGREEMENT_H_

#include <functional>
#include <string>

#include "communicator.h"

namespace poseidon {

// What must be the same on all ranks, as lines of text for a person to read.
struct AgreementText {
  std::string sites;  // what is synchronised; empty lines at the end do not count
  std::string plan;   // how; empty where the graph was not rewritten
};

// How a comparison ended: an error ends the job; a warning is for the user to read.
struct Agreement {
  std::string error;
  std::string warning;
};

// Compares `mine` with rank 0's and calls `done`. If the sites differ, ends the job with a sentence that names the
// first difference; if `strict`, also if the plans differ. Every rank must call it equally often with new `sites`.
// Known sites are not compared again, since ranks retrace a function for new shapes at different times.
//
// Without `strict`, ranks may have different plans: they compute the same, and gradients that not all ranks send as
// factors travel dense (see gather_exchanges.h).
void Agree(Communicator* communicator, const AgreementText& mine, bool strict,
           std::function<void(const Agreement&)> done);

// Names the first line in which two texts differ; empty if they are equal.
std::string FirstDifference(const std::string& mine, int rank, const std::string& theirs, int their_rank);

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_AGREEMENT_H_
