# CUDA without a GPU: a libcuda.so.1 that runs kernels by emulation. Tests find it by
# LD_LIBRARY_PATH; nothing links it. Without a C++ compiler it has no kernels.
add_library(shd_shim_cuda SHARED shim_cuda.c shim_memory.c shim_pin.c shim_stream.c)
target_link_libraries(shd_shim_cuda PRIVATE shd_options shd_proto)
set_target_properties(shd_shim_cuda PROPERTIES OUTPUT_NAME cuda SOVERSION 1
                      LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR})
if(SHD_CXX)
  target_link_libraries(shd_shim_cuda PRIVATE shd_emulated_kernels shd_emulate)
  set_target_properties(shd_shim_cuda PROPERTIES LINKER_LANGUAGE CXX)
endif()

# libnccl.so.2 on top of it
add_library(shd_shim_nccl SHARED shim_nccl.c)
target_link_libraries(shd_shim_nccl PRIVATE shd_options ${CMAKE_DL_LIBS})
set_target_properties(shd_shim_nccl PROPERTIES OUTPUT_NAME nccl SOVERSION 2
                      LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR})

# shd_shim_test(NAME LABELS SOURCES LIBS...): one program and one ctest entry, on the shims
function(shd_shim_test name label sources)
  add_executable(test_${name} ${sources})
  target_link_libraries(test_${name} PRIVATE shd_options shd_tests ${ARGN} shd_kernels ${CMAKE_DL_LIBS} m)
  add_dependencies(test_${name} shd_shim_cuda shd_shim_nccl)
  set_target_properties(test_${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND test_${name})
  shd_test_labels(${name} "${label}")
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77
                       ENVIRONMENT LD_LIBRARY_PATH=${CMAKE_CURRENT_BINARY_DIR})
endfunction()

shd_shim_test(comm "unit;threads" test_comm.c)
# proto/gpu/nccl.h against NCCL's header, where there is one
find_path(SHD_NCCL_INCLUDE nccl.h PATHS /usr/local/cuda/include)
find_path(SHD_CUDART_INCLUDE cuda_runtime.h PATHS /usr/local/cuda/include)
if(SHD_NCCL_INCLUDE AND SHD_CUDART_INCLUDE)
  add_library(nccl_header OBJECT nccl_header.c)
  target_include_directories(nccl_header SYSTEM PRIVATE ${SHD_NCCL_INCLUDE} ${SHD_CUDART_INCLUDE})
  target_link_libraries(nccl_header PRIVATE shd_options)
endif()
if(NOT SHD_CXX)
  return() # no kernels to run
endif()
shd_shim_test(cuda_kern "unit;threads" test_cuda_kern.c)
shd_shim_test(cuda_faults "unit;threads" test_cuda_faults.c)
shd_shim_test(cuda_share "unit;threads" test_cuda_share.c)
# What the host's device refuses, the CUDA device does too
set(kernel_tests ${PROJECT_SOURCE_DIR}/tests/unit/kernels/cpu)
shd_shim_test(cuda_refusals "unit;threads" "${kernel_tests}/test_kernels.c;bare.c" PkgConfig::CRYPTO)
target_compile_definitions(test_cuda_refusals PRIVATE "TEST_ONLY=\"bad_arguments\",\"empty_slices\"")

# proto/gpu/cuda.h against the Toolkit's header and stub, where there is one
get_filename_component(nvcc_bin "${SHD_NVCC}" DIRECTORY)
find_path(SHD_CUDA_INCLUDE cuda.h HINTS ${nvcc_bin}/../include PATHS /usr/local/cuda/include)
find_file(SHD_CUDA_STUB libcuda.so HINTS ${nvcc_bin}/../lib64/stubs PATHS /usr/local/cuda/lib64/stubs
          NO_DEFAULT_PATH)
if(SHD_CUDA_INCLUDE)
  add_executable(test_cuda_abi test_cuda_abi.cpp abi_ours.cpp)
  target_include_directories(test_cuda_abi PRIVATE ${PROJECT_SOURCE_DIR})
  target_include_directories(test_cuda_abi SYSTEM PRIVATE ${SHD_CUDA_INCLUDE})
  target_link_libraries(test_cuda_abi PRIVATE ${CMAKE_DL_LIBS})
  set_target_properties(test_cuda_abi PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  add_test(NAME cuda_abi COMMAND test_cuda_abi $<$<BOOL:${SHD_CUDA_STUB}>:${SHD_CUDA_STUB}>)
  set_tests_properties(cuda_abi PROPERTIES LABELS unit)
endif()

# The host's kernel tests with the CUDA device in the host's place. About numbers, not threads, and a
# fiber per thread costs ThreadSanitizer minutes.
if(SHD_SANITIZE MATCHES thread)
  return()
endif()
foreach(name kern_fill kern_sum kern_update)
  shd_shim_test(cuda_${name} unit "${kernel_tests}/test_${name}.c;mirror.c")
endforeach()
