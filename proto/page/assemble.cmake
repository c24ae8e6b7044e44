# cmake -DOUT=page.html -P assemble.cmake: the page as one file: page.html with each line @NAME@
# replaced by the file NAME beside it; comments and indentation are dropped.
set(here ${CMAKE_CURRENT_LIST_DIR})
set(bytes_max 73728)

file(READ ${here}/page.html page)
string(REGEX MATCHALL "@[a-z]+\\.(css|js)@" places "${page}")
foreach(place IN LISTS places)
  string(REPLACE "@" "" name "${place}")
  file(READ ${here}/${name} text)
  string(REPLACE "\n@${name}@\n" "\n${text}" page "${page}")
endforeach()
string(REGEX REPLACE "/\\*[^*]*\\*/" "" page "${page}")
string(REGEX REPLACE "[ ]*\n[ \n]+" "\n" page "${page}")

string(LENGTH "${page}" bytes)
if(bytes GREATER bytes_max)
  message(FATAL_ERROR "the page has ${bytes} bytes, at most ${bytes_max} are meant")
endif()
file(WRITE ${OUT} "${page}")
