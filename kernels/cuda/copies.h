// A GPU's copies and events, by the CUDA runtime. Includes nothing of CUDA's, so that it can be called where that is
// not.

#ifndef POSEIDON_CUDA_COPIES_H_
#define POSEIDON_CUDA_COPIES_H_

#include "../communicator/device.h"

namespace poseidon {

// The GPU of this number, as the CUDA runtime counts those that the process sees. It lives as long as the process.
Device* CudaDevice(int number);

}  // namespace poseidon

// Whether this machine's driver is too old for the compiler of these sources. Writes the versions of CUDA that it
// supports, 0 where there is no driver, and that of the compiler: 1000 times the major version plus 10 times the minor
// one.
extern "C" __attribute__((visibility("default"))) bool poseidon_is_driver_too_old(int* driver, int* compiler);

#endif  // POSEIDON_CUDA_COPIES_H_
