/* What proto/gpu/cuda.h says of the driver's interface, for test_cuda_abi.cpp. */
#include "proto/gpu/cuda.h"
#include "tests/cuda/abi.h"

#define OURS(member, symbol, arguments) { symbol, abi_signature(decltype(cuda::member)()) },
const struct abi_function abi_ours[] = { CUDA_FUNCTIONS(OURS){ nullptr, "" } };
#undef OURS

const struct abi_value abi_our_values[] = { ABI_VALUES{ nullptr, 0 } };
