# OUT from IN: each line "@flags VERB@" becomes the items of the verb's flags.
file(READ ${IN} text)
string(REGEX MATCHALL "@flags [a-z]+@" marks "${text}")
foreach(mark IN LISTS marks)
  string(REGEX REPLACE "@flags (.*)@" "\\1" verb ${mark})
  execute_process(COMMAND ${SHARDCTL} ${verb} --list-mdoc OUTPUT_VARIABLE items
                  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE "${mark}" "${items}" text "${text}")
endforeach()
file(WRITE ${OUT} "${text}")
