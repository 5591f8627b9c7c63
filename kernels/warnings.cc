// Keeps who takes the warnings of kernels, and calls it one warning at a time.
//
// Tests: tests/training/test_rewritten.py.

#include "warnings.h"

#include <mutex>

#include "tensorflow/core/platform/logging.h"

namespace poseidon {
namespace {

std::mutex mutex;
void (*taker)(const char* text) = nullptr;

}  // namespace

void Warn(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex);
  if (taker) {
    taker(text.c_str());
  } else {
    LOG(WARNING) << text;
  }
}

}  // namespace poseidon

extern "C" void poseidon_set_warn(void (*warn)(const char* text)) {
  std::lock_guard<std::mutex> lock(poseidon::mutex);
  poseidon::taker = warn;
}
