# What the folders of tests have in common. Programs are built in build/PRESET/tests, whatever folder
# their source lies in. Labels: unit, sim, e2e (several processes); of unit tests also threads, where
# ThreadSanitizer has something to see: scripts/test.sh builds and runs these alone with it (target
# test_threads). No test has a time limit of its own: only a hang meets ctest's, which is the presets'.
set(shd_bin ${PROJECT_BINARY_DIR}/bin)

function(shd_test_labels name labels)
  set_tests_properties(${name} PROPERTIES LABELS "${labels}")
  if(threads IN_LIST labels)
    add_dependencies(test_threads test_${name})
  endif()
endfunction()

# Begun first, lest one of them runs on alone at the end: what takes longer than about 15 s. (From its
# second run on ctest knows by itself.) Of this folder; a test that this build has not is passed over.
function(shd_long_tests)
  foreach(name ${ARGN})
    if(TEST ${name})
      set_tests_properties(${name} PROPERTIES COST 30)
    endif()
  endforeach()
endfunction()

# Those that compute all the time they run, each on one processor or more: such a test counts for three
# of ctest's, which else are as many that wait.
function(shd_busy_tests)
  foreach(name ${ARGN})
    if(TEST ${name})
      set_tests_properties(${name} PROPERTIES PROCESSORS 3)
    endif()
  endforeach()
endfunction()

# shd_test(NAME LABELS LIBS...): test_NAME.c of this folder as one program and one ctest entry.
function(shd_test name label)
  add_executable(test_${name} test_${name}.c)
  target_link_libraries(test_${name} PRIVATE shd_options shd_tests ${ARGN})
  set_target_properties(test_${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND test_${name})
  shd_test_labels(${name} "${label}")
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77)
endfunction()

# shd_script_test(NAME LABEL FILE ARGUMENTS...): a script of this folder, run by python3 where
# it is one of Python's; the test is left out where there is no python3. 77 is skipped.
function(shd_script_test name label file)
  set(command ${CMAKE_CURRENT_SOURCE_DIR}/${file})
  if(file MATCHES "\\.py$")
    if(NOT PYTHON3)
      return()
    endif()
    list(PREPEND command ${PYTHON3})
  endif()
  add_test(NAME ${name} COMMAND ${command} ${ARGN})
  set_tests_properties(${name} PROPERTIES LABELS ${label} SKIP_RETURN_CODE 77
                       ENVIRONMENT PYTHONDONTWRITEBYTECODE=1)
endfunction()
