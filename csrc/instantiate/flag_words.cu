#include "kernels/common/flag_words.cuh"
