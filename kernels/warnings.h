// Warnings of kernels. Python takes them for its logger "tf_poseidon", so that one place shows, keeps or silences
// what all of the package says.

#ifndef POSEIDON_WARNINGS_H_
#define POSEIDON_WARNINGS_H_

#include <string>

namespace poseidon {

// Hands `text` to whoever has asked for warnings, on this thread; to TensorFlow's log if nobody has.
void Warn(const std::string& text);

}  // namespace poseidon

// Takes all warnings from now on; null leaves them to TensorFlow's log. When it returns, what took them before is not
// called any more.
extern "C" __attribute__((visibility("default"))) void poseidon_set_warn(void (*warn)(const char* text));

#endif  // POSEIDON_WARNINGS_H_
