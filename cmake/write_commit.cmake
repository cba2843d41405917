# Writes HEADER with the commit of SOURCE_DIR as FOVEA_COMMIT: twelve digits, "-changed" appended when tracked files
# differ from it, "unknown" outside a repository. The file keeps its time when nothing changed.
execute_process(COMMAND git -C ${SOURCE_DIR} rev-parse --short=12 HEAD OUTPUT_VARIABLE commit
                OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(failed)
  set(commit unknown)
else()
  execute_process(COMMAND git -C ${SOURCE_DIR} status --porcelain --untracked-files=no
                  OUTPUT_VARIABLE changes ERROR_QUIET)
  if(NOT changes STREQUAL "")
    string(APPEND commit "-changed")
  endif()
endif()
file(CONFIGURE OUTPUT ${HEADER} CONTENT "#pragma once\n#define FOVEA_COMMIT \"${commit}\"\n" @ONLY)
