// Says which TensorFlow this library was compiled against, as a text that the loader finds in the
// file: a library for another TensorFlow may not survive being loaded.

namespace poseidon {

extern const char kBuiltFor[];
__attribute__((used)) const char kBuiltFor[] = "poseidon built for TensorFlow " POSEIDON_TENSORFLOW_VERSION;

}  // namespace poseidon
