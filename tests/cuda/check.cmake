# What is run once and cold on a GPU. Not under sanitizers: those are for the programs it starts.
if(NOT SHD_SANITIZE)
  add_test(NAME gpu_check COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/test_gpu_check.sh ${PROJECT_BINARY_DIR}
           ${CMAKE_CURRENT_BINARY_DIR})
  set_tests_properties(gpu_check PROPERTIES LABELS e2e SKIP_RETURN_CODE 77)
endif()
