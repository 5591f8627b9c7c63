// Compares once, between the ranks, what a training function synchronises and how.

#ifndef POSEIDON_COMMUNICATOR_AGREEMENT_H_
#define POSEIDON_COMMUNICATOR_AGREEMENT_H_

#include <functional>
#include <string>

#include "communicator.h"

namespace poseidon {

// What must be the same on all ranks, as lines of text for a person to read.
struct Form {
  std::string sites;  // what is synchronised; empty lines at the end do not count
  std::string plan;   // how; empty where the graph was not rewritten
};

// How a comparison ended: an error ends the job; a warning is for the user to read.
struct Agreement {
  std::string error;
  std::string warning;
};

// Compares `mine` with rank 0's form and calls `done`. If the sites differ, it ends the job with a
// sentence that names the first difference; the same goes for the plans if `strict`. Every rank must call it equally
// often with new `sites`; sites that were compared before are not compared again, since a
// function is traced again for every other shape of its data, and not on all ranks alike.
//
// Without `strict`, ranks may have different plans: they compute the same, and what they do not all
// send as factors travels dense (see factors.h).
void Agree(Communicator* communicator, const Form& mine, bool strict,
           std::function<void(const Agreement&)> done);

// Says which is the first line that two texts differ in; empty if they do not.
std::string FirstDifference(const std::string& mine, int rank, const std::string& theirs,
                            int their_rank);

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_AGREEMENT_H_
