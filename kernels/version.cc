// Tells the loader which TensorFlow this library was compiled against, before TensorFlow loads it.

extern "C" __attribute__((visibility("default"))) const char* poseidon_built_for_tensorflow() {
  return POSEIDON_TENSORFLOW_VERSION;
}
