function _gpipe
    set -l candidates (COMP_LINE=(commandline -cp) gpipe -sc query=fish 2>/dev/null)
    if set -q candidates[1]
        printf '%s\n' $candidates
    else
        complete -C "'' "(commandline -ct)
    end
end
complete -c gpipe -f -a '(_gpipe)'
