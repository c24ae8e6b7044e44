# What is run once and cold on a GPU. Not under sanitizers: those are for the programs it starts.
if(NOT SHD_SANITIZE)
  set(kernels none)
  if(SHD_NVCC)
    set(kernels nvcc)
  endif()
  shd_script_test(gpu_check e2e test_gpu_check.sh ${PROJECT_BINARY_DIR} ${CMAKE_CURRENT_BINARY_DIR}
                  ${kernels})
endif()
