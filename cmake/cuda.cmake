# Kernels for GPUs. Host code never needs the CUDA Toolkit: where nvcc is missing, images are empty.
#
#   shd_cuda_image(TARGET NAME FILE.cu)    FILE compiled to a fatbin and put into TARGET:
#       extern const unsigned char NAME[];
#       extern const uint64_t NAME_bytes;      0: this build has no nvcc
#     with what ptxas said (registers, spills) in NAME.ptxas.txt beside it.
#   shd_cuda_ptx(NAME FILE.cu)             a target; FILE compiled as in the image, but to NAME.ptx
#     in the current binary folder. Only where SHD_NVCC is true.
#   shd_cuda_emulated(NAME FILE.cu)        an object library of FILE as plain C++, for
#     tests/cuda/emulate.h; only where SHD_CXX is true.
set(SHD_CUDA AUTO CACHE STRING "Compile the GPU kernels: AUTO (if nvcc is found), ON, OFF")
set_property(CACHE SHD_CUDA PROPERTY STRINGS AUTO ON OFF)
set(SHD_CUDA_ARCH 90 CACHE STRING "Compute capability of the GPU code; PTX of it goes along")
set(SHD_NVCC "")
if(NOT SHD_CUDA STREQUAL "OFF")
  find_program(NVCC_PROGRAM nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda/bin)
  if(NVCC_PROGRAM)
    set(SHD_NVCC ${NVCC_PROGRAM})
  elseif(SHD_CUDA STREQUAL "ON")
    message(FATAL_ERROR "SHD_CUDA=ON, but there is no nvcc")
  endif()
endif()

# -fmad=false: what is fused is written fmaf(). The rest says what the host kernels do, too.
set(SHD_NVCC_FLAGS -std=c++17 -O3 -fmad=false -ftz=true -prec-div=true -prec-sqrt=true
    -I${PROJECT_SOURCE_DIR})

function(shd_cuda_image target name file)
  get_filename_component(source ${file} ABSOLUTE)
  set(holder ${CMAKE_CURRENT_BINARY_DIR}/${name}.c)
  set(image ${CMAKE_CURRENT_BINARY_DIR}/${name}.fatbin)
  if(SHD_NVCC)
    add_custom_command(OUTPUT ${image}
      COMMAND sh ${PROJECT_SOURCE_DIR}/cmake/nvcc.sh ${name}.ptxas.txt ${SHD_NVCC} ${SHD_NVCC_FLAGS} -Xptxas -v
              -gencode arch=compute_${SHD_CUDA_ARCH},code=[sm_${SHD_CUDA_ARCH},compute_${SHD_CUDA_ARCH}]
              -MD -MF ${name}.fatbin.d -MT ${image} -fatbin ${source} -o ${image}
      WORKING_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}
      DEPENDS ${source} ${PROJECT_SOURCE_DIR}/cmake/nvcc.sh
      DEPFILE ${CMAKE_CURRENT_BINARY_DIR}/${name}.fatbin.d
      COMMENT "Compiling ${name} for sm_${SHD_CUDA_ARCH}" VERBATIM)
    set_source_files_properties(${holder} PROPERTIES OBJECT_DEPENDS ${image})
  else()
    set(image ${image}.none)
    file(WRITE ${image} "")
  endif()
  configure_file(${PROJECT_SOURCE_DIR}/cmake/cuda_image.c.in ${holder} @ONLY)
  target_sources(${target} PRIVATE ${holder})
endfunction()

function(shd_cuda_ptx name file)
  set(ptx ${CMAKE_CURRENT_BINARY_DIR}/${name}.ptx)
  add_custom_command(OUTPUT ${ptx}
    COMMAND ${SHD_NVCC} ${SHD_NVCC_FLAGS} -arch=compute_${SHD_CUDA_ARCH} -MD -MF ${ptx}.d -MT ${ptx}
            -ptx ${file} -o ${ptx}
    DEPENDS ${file} DEPFILE ${ptx}.d COMMENT "Compiling ${name} to PTX" VERBATIM)
  add_custom_target(${name}_ptx ALL DEPENDS ${ptx})
endfunction()

# A C++ compiler is needed for tests of GPU code alone (and not where libFuzzer's flags go along).
set(SHD_CXX FALSE)
if(NOT SHD_FUZZ)
  include(CheckLanguage)
  check_language(CXX)
  if(CMAKE_CXX_COMPILER)
    enable_language(CXX)
    set(CMAKE_CXX_STANDARD 17)
    set(CMAKE_CXX_VISIBILITY_PRESET hidden)
    set(SHD_CXX TRUE)
  endif()
endif()

# ThreadSanitizer cannot follow code on the emulation's fibers. As properties of sources, these
# come after shd_options' flags.
set(SHD_EMULATE_FLAGS -O2 -ffp-contract=off -Wno-unknown-pragmas -include
    ${PROJECT_SOURCE_DIR}/tests/cuda/emulate_device.h)
if(SHD_SANITIZE MATCHES "thread")
  list(APPEND SHD_EMULATE_FLAGS -fno-sanitize=thread)
endif()

function(shd_cuda_emulated name file)
  add_library(${name} OBJECT ${file})
  set_source_files_properties(${file} PROPERTIES LANGUAGE CXX
                              COMPILE_OPTIONS "-xc++;${SHD_EMULATE_FLAGS}")
  target_link_libraries(${name} PRIVATE shd_options)
endfunction()
