# The reference worker on a GPU. cuBLAS has a stand-in, too: libcublas.so.13 beside the driver's,
# which runs its kernel by that driver's emulation, as the worker's own are run.
add_library(shd_shim_cublas SHARED shim_cublas.c)
target_link_libraries(shd_shim_cublas PRIVATE shd_options shd_proto)
set_target_properties(shd_shim_cublas PROPERTIES OUTPUT_NAME cublas SOVERSION 13
                      LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR})
shd_cuda_emulated(gpt_emulated_kernels ${PROJECT_SOURCE_DIR}/examples/gpt/cuda/kernels.cu)
shd_cuda_emulated(shim_emulated_gemm shim_gemm.cu)
target_link_libraries(shd_shim_cuda PRIVATE gpt_emulated_kernels shim_emulated_gemm)

foreach(name gpt_cuda_kernels gpt_cuda_attention gpt_cuda_moe gpt_cuda_model)
  shd_shim_test(${name} "unit;threads" test_${name}.c gpt_model gpt_model_f64)
  add_dependencies(test_${name} shd_shim_cublas)
endforeach()

# The real programs
set(ways all)
if(SHD_SANITIZE)
  set(ways once)
endif()
shd_script_test(gpt_cuda e2e test_gpt_cuda.sh ${shd_bin} ${CMAKE_CURRENT_BINARY_DIR} ${ways})

# Declarations of ours beside the Toolkit's, where there is one
find_path(CUBLAS_INCLUDE_DIR cublas_api.h HINTS ENV CUDA_HOME ENV CUDA_PATH
          PATHS /usr/local/cuda/include PATH_SUFFIXES include)
if(CUBLAS_INCLUDE_DIR)
  shd_shim_test(cublas_abi unit test_cublas_abi.c gpt_model)
  target_include_directories(test_cublas_abi SYSTEM PRIVATE ${CUBLAS_INCLUDE_DIR})
endif()
