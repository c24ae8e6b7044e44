/* What examples/gpt/cuda/cublas.h declares is what the CUDA Toolkit's header does, compiled where
 * there is one: numbers, sizes of enums, and each function's arguments.
 */
#define cublasStatus_t                                   our_status
#define cublasOperation_t                                our_operation
#define cublasMath_t                                     our_math
#define cublasComputeType_t                              our_compute
#define cublasGemmAlgo_t                                 our_algo
#define cudaDataType                                     our_type
#define CUBLAS_STATUS_SUCCESS                            OUR_SUCCESS
#define CUBLAS_OP_N                                      OUR_OP_N
#define CUBLAS_OP_T                                      OUR_OP_T
#define CUBLAS_GEMM_DEFAULT                              OUR_GEMM_DEFAULT
#define CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION OUR_DISALLOW
#define CUBLAS_COMPUTE_32F                               OUR_32F
#define CUBLAS_COMPUTE_32F_PEDANTIC                      OUR_32F_PEDANTIC
#define CUBLAS_COMPUTE_32F_FAST_TF32                     OUR_32F_TF32
#define CUDA_R_32F                                       OUR_R_32F
#define CUDA_R_16F                                       OUR_R_16F
#define CUDA_R_16BF                                      OUR_R_16BF
#define CUuuid                                           our_uuid /* the driver's, which the header has as well */
#include "examples/gpt/cuda/cublas.h"
#undef CUuuid
#undef cublasStatus_t
#undef cublasOperation_t
#undef cublasMath_t
#undef cublasComputeType_t
#undef cublasGemmAlgo_t
#undef cudaDataType
#undef CUBLAS_STATUS_SUCCESS
#undef CUBLAS_OP_N
#undef CUBLAS_OP_T
#undef CUBLAS_GEMM_DEFAULT
#undef CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
#undef CUBLAS_COMPUTE_32F
#undef CUBLAS_COMPUTE_32F_PEDANTIC
#undef CUBLAS_COMPUTE_32F_FAST_TF32
#undef CUDA_R_32F
#undef CUDA_R_16F
#undef CUDA_R_16BF

#include <assert.h>
#include <cublas_api.h>

#include "tests/lib/test.h"

#define SAME(ours, theirs) static_assert((int)(ours) == (int)(theirs), #theirs)
SAME(OUR_SUCCESS, CUBLAS_STATUS_SUCCESS);
SAME(OUR_OP_N, CUBLAS_OP_N);
SAME(OUR_OP_T, CUBLAS_OP_T);
SAME(OUR_GEMM_DEFAULT, CUBLAS_GEMM_DEFAULT);
SAME(OUR_DISALLOW, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
SAME(OUR_32F, CUBLAS_COMPUTE_32F);
SAME(OUR_32F_PEDANTIC, CUBLAS_COMPUTE_32F_PEDANTIC);
SAME(OUR_32F_TF32, CUBLAS_COMPUTE_32F_FAST_TF32);
SAME(OUR_R_32F, CUDA_R_32F);
SAME(OUR_R_16F, CUDA_R_16F);
SAME(OUR_R_16BF, CUDA_R_16BF);
SAME(sizeof(our_status), sizeof(cublasStatus_t));
SAME(sizeof(our_operation), sizeof(cublasOperation_t));
SAME(sizeof(our_math), sizeof(cublasMath_t));
SAME(sizeof(our_compute), sizeof(cublasComputeType_t));
SAME(sizeof(our_algo), sizeof(cublasGemmAlgo_t));
SAME(sizeof(our_type), sizeof(cudaDataType));
SAME(1, CUBLAS_STATUS_NOT_INITIALIZED);
SAME(3, CUBLAS_STATUS_ALLOC_FAILED);
SAME(7, CUBLAS_STATUS_INVALID_VALUE);
SAME(8, CUBLAS_STATUS_ARCH_MISMATCH);
SAME(13, CUBLAS_STATUS_EXECUTION_FAILED);
SAME(14, CUBLAS_STATUS_INTERNAL_ERROR);
SAME(15, CUBLAS_STATUS_NOT_SUPPORTED);

/* The list once more, with their types in place of ours. */
/* NOLINTBEGIN(bugprone-macro-parentheses): types */
#define SAME_FUNCTION(member, symbol, arguments)                                                  \
    static_assert(__builtin_types_compatible_p(__typeof__(&symbol), cublasStatus_t(*) arguments), \
                  #symbol);
/* NOLINTEND(bugprone-macro-parentheses) */
CUBLAS_FUNCTIONS(SAME_FUNCTION)

TEST(names_of_statuses)
{
    EXPECT_STR(cublas_status_name(CUBLAS_STATUS_NOT_SUPPORTED), "CUBLAS_STATUS_NOT_SUPPORTED");
    EXPECT_STR(cublas_status_name(CUBLAS_STATUS_SUCCESS), "CUBLAS_STATUS_SUCCESS");
    EXPECT_STR(cublas_status_name(-1), "an unknown status");
}

TEST_MAIN()
