// A GPU's copies and events, by the CUDA runtime. Includes nothing of CUDA's, so that it can be called where that is
// not.

#ifndef POSEIDON_CUDA_COPIES_H_
#define POSEIDON_CUDA_COPIES_H_

#include "../communicator/device.h"

namespace poseidon {

// The GPU of this number, as the CUDA runtime counts those that the process sees. It lives as long as the process.
Device* CudaDevice(int number);

}  // namespace poseidon

#endif  // POSEIDON_CUDA_COPIES_H_
